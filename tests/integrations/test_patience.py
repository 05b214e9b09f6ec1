"""With `patience`, nobody waits for a straggler for longer, and what it computed meanwhile counts when it comes."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import spardl
from local_updates import attach, shared_weights
from processes import on_processes
from spardl.collectives.program import Round
from spardl.transport.direct import DirectTransport
from spardl.update import LocalUpdates
from training import all_equal

WORKERS, EACH, LATE = 3, 40, 1  # ranks; weights that only one of them moves; the straggler
MOST = 3000  # steps, in which a straggler must have come back
AFTERWARDS = 5
PATIENCE_S = 3.0


class Own(nn.Module):
    """Each rank moves its own stretch of the weights, by one in each step: what counts of whom can be told apart."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(WORKERS * EACH))
        self.slope = torch.zeros(WORKERS * EACH)
        self.slope[rank * EACH : (rank + 1) * EACH] = -6.0  # a third and a half of which are exact

    def forward(self) -> Tensor:
        return self.weights @ self.slope


class Walk:
    """One rank's training, with as many steps as it has made itself."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        self.model = Own(rank)
        self.optimizer = SGD(self.model.parameters(), lr=1.0)
        always = {"on_loss": "continue", "patience": PATIENCE_S, "outer_rate": 1.0, "values": "fp32"}
        self.sync = attach(self.model, self.optimizer, **always, **settings)
        self.made = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()
        self.made += 1

    def until(self, workers: int) -> None:
        """Train until so many take part, and for a few steps more."""
        for _ in range(MOST):
            self.step()
            if self.sync.company.workers == workers:
                break
        assert self.sync.company.workers == workers

    def end(self) -> dict[str, Any]:
        """All ranks come to the same step; then everything is sent."""
        until = self.sync.steps + AFTERWARDS
        while self.sync.steps < until:
            self.step()
        before = shared_weights(self.sync, self.model)
        self.sync.flush()
        changes = [(each.left, each.joined) for each in self.sync.stats().changes]
        company = self.sync.company
        return {"made": self.made, "before": before, "end": shared_weights(self.sync, self.model), "changes": changes,
                "members": company.members, "steps": self.sync.steps}  # fmt: skip


def wait_in_the_vote(missed: Any) -> None:
    """Have this rank straggle before its second round of the next vote: what it has said in the first is known."""
    perform, seen = DirectTransport.perform, []

    def perform_late(self: Any, operation: Any) -> Any:
        if isinstance(operation, Round) and operation.name == "agreement to conclude":
            seen.append(operation)
            assert len(seen) != 2 or missed.wait(60)
        return perform(self, operation)

    DirectTransport.perform = perform_late  # type: ignore[method-assign]


def straggle(rank: int, workers: int, missed: Any, settings: dict[str, Any], in_vote: bool) -> dict[str, Any]:
    """The straggler computes, or votes, until the others have gone on without it, and have made a few steps more."""
    walk = Walk(rank, settings)
    for _ in range(4):
        walk.step()
    if rank == LATE:
        if in_vote:
            wait_in_the_vote(missed)
        else:
            assert missed.wait(60)
        while walk.sync.company.members == (0, 1, 2):
            walk.step()
    else:
        walk.until(workers=2)
        for _ in range(3):
            walk.step()
        missed.set()
        walk.until(workers=3)
    return walk.end()


WAYS = [
    pytest.param({"density": 0.05, "delay": 1}, False),
    pytest.param({"method": "dense", "density": 1.0}, True),
    pytest.param({"method": "dense", "density": 1.0}, False, marks=pytest.mark.slow),
    pytest.param({"density": 0.05, "every": 2, "apply": "reset"}, False, marks=pytest.mark.slow),
    pytest.param({"density": 0.05, "every": 2, "apply": "reset"}, True, marks=pytest.mark.slow),
    pytest.param({"density": 0.1, "method": "exdyna", "paranoid": 1}, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("settings", "in_vote"), WAYS, ids=str)
def test_all_that_a_straggler_computes_counts_to_the_last_bit(settings: dict[str, Any], in_vote: bool) -> None:
    """It sends among three, whenever it sends: so of each step that it made a third is in the end, exactly. The others
    sent among two, too, while it was away."""
    event = multiprocessing.get_context("fork").Event()
    ranks = on_processes(WORKERS, straggle, event, settings, in_vote)
    assert all_equal(each["before"] for each in ranks) and all_equal(each["end"] for each in ranks)
    assert all(each["members"] == (0, 2, 3) for each in ranks)
    assert len({each["steps"] for each in ranks}) == 1
    assert ranks[0]["changes"] == ranks[2]["changes"] == [((1,), ()), ((), (3,))]
    late = ranks[LATE]
    assert late["made"] < ranks[0]["made"]
    stretches = late["end"].view(WORKERS, EACH)
    assert torch.equal(stretches[LATE], torch.full((EACH,), 2.0 * late["made"]))
    for rank in (0, 2):
        made = ranks[rank]["made"]
        assert (stretches[rank] >= 2.0 * made).all() and (stretches[rank] < 3.0 * made).all()
    # Which of them had the largest entries meanwhile hangs on how many steps that was.
    assert any((stretches[rank] > 2.0 * ranks[rank]["made"]).any() for rank in (0, 2))


def freeze(rank: int, workers: int, pids: Any, missed: Any) -> dict[str, Any]:
    """Rank 0 has the straggler's process stopped, and lets it run again once the others have gone on."""
    walk = Walk(rank, {"density": 0.1})
    if rank == LATE:
        pids.put(os.getpid())
        while walk.sync.company.members == (0, 1, 2):
            walk.step()
        return walk.end()
    straggler = pids.get(timeout=60) if rank == 0 else 0
    for _ in range(4):
        walk.step()
    if rank == 0:
        os.kill(straggler, signal.SIGSTOP)
    walk.until(workers=2)
    if rank == 0:
        os.kill(straggler, signal.SIGCONT)
    walk.until(workers=3)
    return walk.end()


@pytest.mark.slow
def test_a_process_that_was_stopped_comes_back_too() -> None:
    context = multiprocessing.get_context("fork")
    ranks = on_processes(WORKERS, freeze, context.Queue(), context.Event())
    assert all_equal(each["end"] for each in ranks) and all(each["members"] == (0, 2, 3) for each in ranks)
    late = ranks[LATE]
    assert torch.equal(late["end"].view(WORKERS, EACH)[LATE], torch.full((EACH,), 2.0 * late["made"]))


def test_patience_needs_ranks_that_may_go_on() -> None:
    with pytest.raises(spardl.ConfigError, match='give on_loss="continue" too'):
        LocalUpdates(patience=3.0)
    for bad in (0, -1.0, "long"):
        with pytest.raises(spardl.ConfigError, match="is no time to wait"):
            LocalUpdates(on_loss="continue", patience=bad)  # type: ignore[arg-type]
