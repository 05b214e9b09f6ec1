"""What goes wrong is an error with a name in it, on every rank, in time; and residuals are intact."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from training import loss_of, mlp, sgd, train

# Seconds that no test waits for: whoever would wait so long for a dead rank fails it.
FOREVER = 1000


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def deserted(
    rank: int, workers: int, settings: dict[str, Any], leave: Callable[[Any], None], together: Any
) -> dict[str, Any]:
    """Rank 2 leaves in the middle of its fourth backward, when the first groups have been exchanged.

    The others stay until all `together` have noticed, lest the slower one hear of the faster one's end instead.
    """
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
    optimizer = sgd(model, momentum=0.9)
    sync = spardl.attach(model, optimizer=optimizer, density=0.1, teams=1, **settings)
    train(model, optimizer, range(3))
    before = sync.state_dict()
    if rank == 2:
        model.module[0].bias.register_hook(lambda _: (sync.session.wait(), leave(together)))
    optimizer.zero_grad()
    with pytest.raises(spardl.PeerError) as caught:
        loss_of(model, rank, 3).backward()
    together.wait(60)
    with torch.no_grad():
        loss_of(model, rank, 4)
    with pytest.raises(spardl.PeerError) as again:
        loss_of(model, rank, 4).backward()
    return {
        "text": str(caught.value),
        "note": caught.value.__notes__,
        "peer": caught.value.peer,
        "again": str(again.value),
        "intact": same(before, sync.state_dict()),
    }


def desert(settings: dict[str, Any], leave: Callable[[Any], None]) -> list[Any]:
    together = multiprocessing.get_context("fork").Barrier(3 if leave is fall_silent else 2)
    return on_processes(3, deserted, settings, leave, together, expect="any")


def die(_: Any) -> None:
    os._exit(0)


def fall_silent(together: Any) -> None:
    """Until the others have noticed."""
    together.wait(60)
    os._exit(0)


@pytest.mark.parametrize(("groups", "last_group"), [("model", "4.bias .. 0.weight"), (1000, "0.bias .. 0.weight")])
def test_a_rank_that_dies_is_named_by_the_others_at_once(groups: str | int, last_group: str) -> None:
    """Survivors raise PeerError out of backward() with the rank in it, without waiting for the timeout.

    Whatever had been exchanged of that step is undone, and the next step raises the same again instead of hanging.
    """
    *survivors, dead = desert({"groups": groups, "dense_below": 0, "timeout": FOREVER}, die)
    assert dead == ("died", None)
    for kind, found in survivors:
        assert kind == "returned", found
        assert found["peer"] == 2
        assert re.match(r"rank 2 at 127\.0\.0\.1:\d+ (closed the connection|has failed rank \d, which)", found["text"])
        assert found["text"].endswith("Residuals are intact; resume from the last checkpoint.")
        assert found["note"] == [f"while synchronising the group {last_group}"]
        assert found["intact"]
        assert found["again"] == found["text"]


def test_a_rank_that_stays_silent_is_named_after_the_timeout() -> None:
    """A rank that hangs is an error after `timeout` seconds; its process may be gone, says the text."""
    *waiting, _ = desert({"groups": 1000, "dense_below": 0, "timeout": 3}, fall_silent)
    for kind, found in waiting:
        assert kind == "returned", found
        assert found["peer"] == 2
        late = r"rank 2 at 127\.0\.0\.1:\d+ ((sent|took) nothing for 3 s in round \d+, spar_|has failed rank \d, which)"
        assert re.match(late, found["text"]), found["text"]
        assert found["intact"]


def test_a_dense_group_names_the_rank_that_dies_as_well() -> None:
    """The transport's own all-reduce only knows that it failed; the survivors then find out who is gone."""
    *survivors, _ = desert({"groups": 1000, "dense_below": 10_000, "timeout": FOREVER}, die)
    for kind, found in survivors:
        assert kind == "returned", found
        assert found["peer"] == 2
        assert "rank 2 (127.0.0.1) is gone" in found["text"]
        assert found["intact"]
        assert found["again"] == found["text"]


def test_a_dense_group_names_the_rank_that_stays_silent() -> None:
    *waiting, _ = desert({"groups": 1000, "dense_below": 10_000, "timeout": 3}, fall_silent)
    for kind, found in waiting:
        assert kind == "returned", found
        assert found["peer"] == 2
        assert "rank 2 (127.0.0.1) answers, but came late or is elsewhere in its program" in found["text"]
        assert found["intact"]


def stopped_at_attach(rank: int, workers: int, who: int, pids: Any, noticed: Any) -> tuple[int | None, str]:
    """One rank is stopped before it attaches, until the others have noticed."""
    model = DistributedDataParallel(mlp())
    pids[rank] = os.getpid()
    dist.barrier()
    if rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(spardl.PeerError) as caught:
        spardl.attach(model, optimizer=False, density=0.1, timeout=2)
    if rank != who:
        noticed.wait(60)
        os.kill(pids[who], signal.SIGCONT)
    return caught.value.peer, str(caught.value)


@pytest.mark.parametrize(
    ("who", "words"), [(0, "its process is stopped or hangs"), (2, "rank 2 of 3 did not come within 2 s")]
)
def test_a_rank_that_is_stopped_before_attach_is_named_and_waited_for_no_longer_than_the_timeout(
    who: int, words: str
) -> None:
    """Rank 0 keeps the store through which ranks meet: torch itself would wait for it without end."""
    context = multiprocessing.get_context("fork")
    found = on_processes(3, stopped_at_attach, who, context.Array("i", 3), context.Barrier(2))
    for rank, (peer, text) in enumerate(found):
        assert peer == who or rank == who, text
        assert words in text or rank == who


def renamed() -> nn.Module:
    return nn.Sequential(OrderedDict((f"layer{name}", layer) for name, layer in mlp().named_children()))


def disagreeing(rank: int, workers: int, case: str) -> tuple[str, tuple[int, int], dict[str, Any], dict[str, Any]]:
    odd = rank == 1
    model = DistributedDataParallel(renamed() if odd and case == "model" else mlp())
    optimizer = sgd(model, momentum=0.8 if odd and case == "momentum" else 0.9)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(spardl.ConfigMismatch) as caught:
        spardl.attach(
            model,
            optimizer=optimizer,
            density=0.02 if odd and case == "density" else 0.01,
            values="fp16" if odd and case == "values" else "bf16",
            timeout=20,
        )
    return str(caught.value), caught.value.ranks, before, optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("density", ["density is 0.01 on rank 0 and 0.02 on rank 1"]),
        ("values", ["values is 'bf16' on rank 0 and 'fp16' on rank 1"]),
        ("model", ["parameters is ['0.weight', [40, 20]", "and ['layer0.weight', [40, 20]"]),
        ("momentum", ["momentum is {'momentum': 0.9,", "and {'momentum': 0.8,"]),
    ],
)
def test_ranks_that_disagree_are_told_so_at_attach(case: str, texts: list[str]) -> None:
    """Every rank raises ConfigMismatch with both ranks and what differs, and the optimizer is as it was."""
    for text, ranks, before, after in on_processes(3, disagreeing, case):
        assert ranks == (0, 1)
        assert text.startswith("ranks 0 and 1 differ in configuration or model: ")
        for part in texts:
            assert part in text
        assert before == after


def refused(rank: int, workers: int) -> dict[str, str]:
    found: dict[str, str] = {}
    model = DistributedDataParallel(mlp())
    cases: dict[str, dict[str, Any]] = {
        "model": {"model": mlp()},
        "optimizer": {"optimizer": "sgd"},
        "scaler": {"scaler": 1024.0},
        "setting": {"densty": 0.1},
        "density": {"density": 0},
        "method": {"method": "spardle"},
        "teams": {"teams": 3},
        "team size": {"team_size": 3},
        "both": {"team_size": 1, "teams": 2},
    }
    for name, settings in cases.items():
        with pytest.raises(spardl.ConfigError) as caught:
            spardl.attach(**{"model": model, "optimizer": False, **settings})
        found[name] = str(caught.value)
    spardl.attach(model, optimizer=False)
    with pytest.raises(spardl.ConfigError) as caught:
        spardl.attach(model, optimizer=False)
    found["twice"] = str(caught.value)
    frozen = mlp().requires_grad_(False)
    frozen.append(nn.Embedding(3, 3, sparse=True))
    with pytest.raises(spardl.ConfigError) as caught:
        spardl.attach(DistributedDataParallel(frozen), optimizer=False)
    found["nothing"] = str(caught.value)
    return found


def test_what_cannot_work_is_refused_with_a_sentence() -> None:
    """Each wrong argument gets an error that says what was given and what to do."""
    expected = {
        "model": "attach needs a DistributedDataParallel model, not Sequential; wrap it first, or give"
        ' when="step" or update="local".',
        "optimizer": "optimizer=str is not a torch optimizer; pass the one that steps this model, a list of",
        "scaler": "scaler=float is not a torch.amp.GradScaler; leave it out if there is none.",
        "setting": "there is no setting 'densty'. Did you mean density? Choose from method, density, ",
        "density": "density 0 is outside (0, 1]",
        "method": "there is no method 'spardle'. Did you mean spardl?",
        "teams": "2 workers cannot form 3 equal teams; choose teams from 1, 2",
        "team size": "2 workers cannot form teams of 3; choose a divisor of 2.",
        "both": "give teams=2 or team_size=1, not both.",
        "twice": "this model has a communication hook already",
        "nothing": "this model has no parameter with a dense gradient",
    }
    for found in on_processes(2, refused):
        assert found.keys() == expected.keys()
        for name, text in found.items():
            assert text.startswith(expected[name]), text


SCRIPT = """
import torch, torch.distributed as dist, spardl
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = DistributedDataParallel(torch.nn.Linear(3, 3))
sync = spardl.attach(model, optimizer=False)
model(torch.ones(1, 3)).sum().backward()
dist.destroy_process_group()
print("destroyed", flush=True)
raise KeyError("unrelated")
"""


@pytest.mark.slow  # starts processes of its own
def test_the_idle_thread_keeps_no_process_alive() -> None:
    """The process group can be destroyed beside it, and a script that ends, here by an exception, ends at once."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=90, check=False)
    assert ran.stdout == "destroyed\n", ran.stderr
    assert ran.stderr.rstrip().endswith("KeyError: 'unrelated'")
    assert ran.returncode == 1
