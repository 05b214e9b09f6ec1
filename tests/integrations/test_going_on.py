"""With on_loss="continue", ranks that are lost leave the others with the same weights, and training goes on."""

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import spardl
from local_updates import attach, shared_weights
from processes import on_processes
from spardl.collectives.program import Round
from spardl.transport import quorum
from spardl.transport.direct import DirectTransport
from training import all_equal, loss_of, mlp, weights_of

SIZE, RATE, STEPS = 240, 0.5, 9


class Ramp(nn.Module):
    """Its gradient is the same wherever it stands, so that where it must end is known."""

    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(slope.numel()))
        self.slope = slope

    def forward(self) -> Tensor:
        return self.weights @ self.slope


def slope_of(rank: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- ways to go: each is called on the rank that is to be lost, after `attach` ----------------------------------------


def in_round(number: int, name: str = "") -> Callable[[Any, int], None]:
    """Before the round of this number, among those of this name, of the exchange in which it is to happen."""

    def arm(sync: Any, exchange: int) -> None:
        perform, seen = DirectTransport.perform, []

        def perform_or_end(self: Any, operation: Any) -> Any:
            if sync.session.sync.steps == exchange and isinstance(operation, Round) and name in operation.name:
                if len(seen) == number:
                    end()
                seen.append(operation)
            return perform(self, operation)

        DirectTransport.perform = perform_or_end  # type: ignore[method-assign]

    return arm


VOTE = "agreement to conclude"
PLACES = {
    "before anything is sent": in_round(0),
    "in the midst of an exchange": in_round(1),
    "before the vote": in_round(0, VOTE),
    "in the midst of the vote": in_round(1, VOTE),
}


def walk(rank: int, workers: int, losses: dict[int, tuple[int, str]], settings: dict[str, Any]) -> dict[str, Any]:
    """Each rank in `losses` is lost in the exchange, and at the place, that it says."""
    model = Ramp(slope_of(rank))
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = attach(model, optimizer, on_loss="continue", outer_rate=1.0, **settings)
    if rank in losses:
        exchange, place = losses[rank]
        PLACES[place](sync, exchange)
    shared = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        shared.append(shared_weights(sync, model))
    sync.flush()
    changes = [dataclasses.asdict(each) for each in sync.stats().changes]
    ranks = (sync.session.transport.rank, sync.session.transport.workers, sync.company.members)
    sync.detach()
    return {"shared": torch.stack(shared), "end": weights_of(model).clone(), "changes": changes, "ranks": ranks}


def survivors(workers: int, losses: dict[int, tuple[int, str]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    outcomes = on_processes(workers, walk, losses, settings, expect="any")
    assert [kind for kind, _ in outcomes] == ["died" if rank in losses else "returned" for rank in range(workers)], (
        outcomes
    )
    return [value for kind, value in outcomes if kind == "returned"]


QUICK = {(0, "in the midst of the vote"), (2, "in the midst of an exchange")}
CASES = [
    pytest.param(lost, place, marks=[] if (lost, place) in QUICK else pytest.mark.slow)
    for lost in (0, 2)
    for place in PLACES
]


@pytest.mark.parametrize(("lost", "place"), CASES)
def test_what_counts_counts_on_all_that_are_left_and_nothing_of_theirs_is_lost(lost: int, place: str) -> None:
    """With everything sent, all weights are known: the exchange in which a rank was lost counts with it or without it,
    on all ranks alike; also if it is rank 0, which keeps the store."""
    left = survivors(3, {lost: (4, place)}, {"density": 1.0, "values": "fp32", "method": "dense"})
    others = [rank for rank in range(3) if rank != lost]
    assert all_equal(each["shared"] for each in left) and all_equal(each["end"] for each in left)
    everyone = torch.stack([slope_of(rank) for rank in range(3)]).mean(0)
    those = torch.stack([slope_of(rank) for rank in others]).mean(0)
    ends = [-RATE * (before * everyone + (STEPS - before) * those) for before in (4, 5)]
    assert any(torch.allclose(left[0]["end"], end, atol=1e-4) for end in ends)
    for position, each in enumerate(left):
        assert each["ranks"] == (position, 2, tuple(others))
        (change,) = each["changes"]
        assert (change["left"], change["members"], change["epoch"]) == ((lost,), tuple(others), 1)
        assert change["step"] in (4, 5)


SPARSE = [
    {"density": 0.05, "delay": 1},
    pytest.param({"density": 0.05}, marks=pytest.mark.slow),
    pytest.param({"density": 0.05, "apply": "reset", "every": 2}, marks=pytest.mark.slow),
    pytest.param({"density": 0.05, "method": "exdyna", "outer": "nesterov", "paranoid": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", SPARSE, ids=str)
def test_whatever_is_exchanged_those_that_are_left_share_the_same_weights(settings: dict[str, Any]) -> None:
    left = survivors(4, {1: (2, "in the midst of an exchange"), 2: (3, "in the midst of the vote")}, settings)
    assert all_equal(each["shared"] for each in left) and all_equal(each["end"] for each in left)
    assert not torch.equal(left[0]["shared"][-1], left[0]["shared"][-3]), "training goes on"
    for each in left:
        assert each["ranks"][1:] == (2, (0, 3))
        assert sorted(number for change in each["changes"] for number in change["left"]) == [1, 2]


@pytest.mark.slow
def test_two_ranks_may_be_lost_at_once_and_one_goes_on_alone() -> None:
    place = "in the midst of an exchange"
    (left,) = survivors(3, {0: (3, place), 1: (3, place)}, {"density": 0.1})
    assert left["ranks"] == (0, 1, (2,))
    assert torch.equal(left["end"], left["end"]) and torch.isfinite(left["end"]).all()


# --- in the midst of the agreement ------------------------------------------------------------------------------------


def leave_at(moment: str) -> None:
    """Have this process end when it is there."""
    lead, follow = quorum._Council._lead, quorum._Council._follow

    def lead_or_end(self: Any, *given: Any) -> Any:
        found = lead(self, *given)
        if moment == "proposed" or (moment == "decided" and found is not None):
            end()
        return found

    def follow_or_end(self: Any, *given: Any) -> Any:
        found = follow(self, *given)
        if moment == "accepted":
            end()
        return found

    quorum._Council._lead, quorum._Council._follow = lead_or_end, follow_or_end  # type: ignore[method-assign]


def lose_two(rank: int, workers: int, second: int, moment: str) -> Any:
    if rank == second:
        leave_at(moment)
    return walk(rank, workers, {3: (3, "in the midst of an exchange")}, {"density": 0.1})


@pytest.mark.parametrize(
    ("second", "moment"),
    [
        (0, "decided"),
        pytest.param(0, "proposed", marks=pytest.mark.slow),
        pytest.param(2, "accepted", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_while_they_agree_is_left_out_too(second: int, moment: str) -> None:
    outcomes = on_processes(4, lose_two, second, moment, expect="any")
    left = [value for kind, value in outcomes if kind == "returned"]
    assert len(left) == 2, outcomes
    assert all_equal(each["shared"] for each in left) and all_equal(each["end"] for each in left)
    assert all(each["ranks"][2] == tuple(rank for rank in (0, 1, 2) if rank != second) for each in left)


# --- who was away -----------------------------------------------------------------------------------------------------


def stop(rank: int, workers: int, together: Any) -> Any:
    """Rank 2 is stopped, for longer than the others wait, until they have gone on."""
    model = Ramp(slope_of(rank))
    optimizer = SGD(model.parameters(), lr=RATE)
    sync = attach(model, optimizer, on_loss="continue", density=0.1, timeout=2)
    pids = sync.session.transport.gather_texts(str(os.getpid()))
    for number in range(STEPS):
        if rank == 2 and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        model().backward()
        try:
            optimizer.step()
        except spardl.PeerError as error:
            together.wait(60)
            return error.peer, str(error)
    if rank == 0:
        os.kill(int(pids[2]), signal.SIGCONT)
    together.wait(60)
    return sync.company.members


@pytest.mark.slow
def test_a_rank_that_wakes_up_is_told_that_the_others_have_gone_on() -> None:
    first, second, third = on_processes(3, stop, multiprocessing.get_context("fork").Barrier(3))
    assert first == second == (0, 1)
    assert third[0] == 2 and "was given up on" in third[1] and "go on without it" in third[1]


# --- a real model -----------------------------------------------------------------------------------------------------


def learn(rank: int, workers: int) -> Any:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sync = attach(model, optimizer, on_loss="continue", density=0.1)
    losses = []
    for step in range(40):
        if rank == 1 and step == 10:
            end()
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 5)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, shared_weights(sync, model)


def test_a_model_goes_on_learning() -> None:
    left = [value for kind, value in on_processes(3, learn, expect="any") if kind == "returned"]
    assert len(left) == 2 and all_equal(weights for _, weights in left)
    assert all(sum(losses[-5:]) < 0.7 * sum(losses[10:15]) for losses, _ in left)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_gradients_cannot_go_on() -> None:
    with pytest.raises(spardl.ConfigError, match="process group that averages gradients ends with its first member"):
        spardl.attach(mlp(), on_loss="continue")


def other_transport(rank: int, workers: int) -> str:
    model = mlp()
    with pytest.raises(spardl.ConfigError) as caught:
        attach(model, SGD(model.parameters(), lr=1), on_loss="continue", transport="torch")
    return str(caught.value)


def test_another_transport_cannot_be_formed_anew() -> None:
    assert all("connections of our own" in text for text in on_processes(2, other_transport))
