"""A newcomer is let in between two exchanges, begins at the shared weights, and is a rank like any other."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

import spardl
from local_updates import attach, shared_weights
from processes import on_processes
from spardl.transport.invitation import Invitation
from training import all_equal, loss_of, mlp

MOST = 5000  # steps, in which a newcomer must have come
AFTERWARDS = 8


def step(model: Any, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number % 7).backward()
    optimizer.step()


def train_together(rank: int, workers: int, letters: Any, settings: dict[str, Any], lost: int | None) -> Any:
    """All ranks but the last are there from the beginning; the last joins them. Then `lost` is lost."""
    here = dist.new_group(list(range(workers - 1)))
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    same = {"on_loss": "continue", "density": 0.1, **settings}
    if rank == workers - 1:
        sync = attach(model, optimizer, invitation=letters.get(timeout=60), **same)
        first = shared_weights(sync, model)
    else:
        sync = attach(model, optimizer, process_group=here, **same)
        if rank == 0:
            letters.put(sync.company.invitation)
        for number in range(MOST):
            step(model, optimizer, rank, number)
            if len(sync.company.members) == workers:
                break
        first = shared_weights(sync, model)
    shared: list[Tensor] = []
    for number in range(AFTERWARDS):
        if rank == lost and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, rank, number)
        shared.append(shared_weights(sync, model))
    sync.flush()
    joined = [each.joined for each in sync.stats().changes]
    return first, torch.stack(shared), shared_weights(sync, model), sync.company.members, joined


WAYS = [{}, {"every": 2}, {"delay": 1}, {"outer": "nesterov", "method": "topka", "paranoid": 1}, {"apply": "reset"}]
WAYS_IN = [pytest.param(way, marks=[] if "delay" in way else pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize("settings", WAYS_IN, ids=str)
def test_a_newcomer_begins_at_the_shared_weights_and_counts(settings: dict[str, Any]) -> None:
    letters = multiprocessing.get_context("fork").Queue()
    ranks = on_processes(4, train_together, letters, settings, None)
    assert all_equal(first for first, *_ in ranks)
    assert all_equal(shared for _, shared, *_ in ranks) and all_equal(end for _, _, end, *_ in ranks)
    assert all(members == (0, 1, 2, 3) for *_, members, _ in ranks)
    assert all((3,) in joined for *_, joined in ranks[:3])
    _, shared, *_ = ranks[0]
    assert not torch.equal(shared[0], shared[-1])


@pytest.mark.slow
def test_a_newcomer_stays_when_rank_0_is_lost() -> None:
    letters = multiprocessing.get_context("fork").Queue()
    outcomes = on_processes(3, train_together, letters, {}, 0, expect="any")
    left = [value for kind, value in outcomes if kind == "returned"]
    assert len(left) == 2, outcomes
    assert all_equal(shared for _, shared, *_ in left) and all_equal(end for _, _, end, *_ in left)
    assert all(members == (1, 2) for *_, members, _ in left)


def differ(rank: int, workers: int, letters: Any) -> Any:
    """The newcomer has other settings: it is told so, and the others go on without it."""
    here = dist.new_group([0, 1])
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if rank == 2:
        with pytest.raises(spardl.ConfigMismatch) as caught:
            attach(model, optimizer, on_loss="continue", density=0.2, invitation=letters.get(timeout=60))
        return str(caught.value)
    sync = attach(model, optimizer, on_loss="continue", density=0.1, process_group=here)
    if rank == 0:
        letters.put(sync.company.invitation)
    for number in range(MOST):
        step(model, optimizer, rank, number)
        if len(sync.stats().changes) >= 2:
            break
    return sync.company.members


def test_a_newcomer_with_other_settings_is_refused_and_the_run_goes_on() -> None:
    first, second, told = on_processes(3, differ, multiprocessing.get_context("fork").Queue())
    assert first == second == (0, 1)
    assert "differ in density: 0.1 there and 0.2 here" in told


def test_an_invitation_is_a_text_and_comes_back_from_it() -> None:
    invitation = Invitation(bytes(range(32)), {0: ("10.0.0.1", 4000), 3: ("::1", 5)})
    assert Invitation.of(str(invitation)) == invitation
    for bad in ("", "spardl:", str(invitation)[7:], "spardl:00:0@h@1", str(invitation) + ",x", "spardl:zz:0@h@1"):
        with pytest.raises(spardl.ConfigError, match="this is no invitation"):
            Invitation.of(bad)


def test_gradients_have_no_newcomers() -> None:
    with pytest.raises(spardl.ConfigError, match="an invitation is to a run with local updates"):
        spardl.attach(mlp(), invitation="spardl:x")
