"""Both sides of every message name one size, which NCCL needs: what the sender fills up to is what is received."""

import itertools
from typing import Any

import pytest
import torch

from messages import message
from programs import synchronized
from spardl.collectives.methods.registry import METHODS
from spardl.collectives.program import AllReduce, Message, Operation, Round
from spardl.config import SyncConfig
from spardl.transport.torchdist import padded
from threads import ThreadTransport, on_threads


class FixedSizes:
    """A transport between threads that moves whole capacities, as NCCL does, and notices where two sides differ."""

    def __init__(self, inner: ThreadTransport) -> None:
        self.rank, self.workers = inner.rank, inner.workers
        self.device, self.traffic = inner.device, inner.traffic
        self.gather_texts, self.close, self.arrive = inner.gather_texts, inner.close, inner.arrive
        self._inner = inner

    def perform(self, operation: Operation) -> Any:
        if isinstance(operation, AllReduce):
            return self._inner.perform(operation)
        whole = [Message(peer, padded(torch.as_tensor(frame), room), room) for peer, frame, room in operation.send]
        arrived = self._inner.perform(Round(whole, operation.receive, operation.name, operation.meanwhile))
        for (peer, capacity), frame in zip(operation.receive, arrived, strict=True):
            assert len(frame) == capacity, f"rank {peer} sent {len(frame)} bytes, not {capacity}, in {operation.name}"
        return arrived


def choices(workers: int) -> list[SyncConfig]:
    """Every method; SparDL also in teams, with either gather, and with blocks that differ in length."""
    found = [SyncConfig(method=method, density=0.02, dense_below=0) for method in METHODS]
    for teams in (size for size in range(2, workers + 1) if workers % size == 0):
        gathers = ("r", "b") if teams & (teams - 1) == 0 else ("b",)
        found += [SyncConfig(density=0.02, teams=teams, gather=gather) for gather in gathers]
    return [*found, SyncConfig(density=0.02, selection="eager", blocks="contiguous", values="int8", indices="raw")]


@pytest.mark.parametrize(
    "workers", [*range(2, 7), *(pytest.param(workers, marks=pytest.mark.slow) for workers in (7, 8, 9))]
)
def test_every_method_runs_where_both_sides_must_name_one_size(workers: int) -> None:
    """And what was filled up changes no bit of any result or residual."""
    for config in choices(workers):
        plain = on_threads(workers, lambda transport, config=config: synchronized(transport, config))
        fixed = on_threads(workers, lambda transport, config=config: synchronized(FixedSizes(transport), config))
        for rank, (one, other) in enumerate(zip(plain, fixed, strict=True)):
            where = f"{config.method} with {config.options} on rank {rank} of {workers}"
            for mine, theirs in itertools.chain(
                zip(one["results"], other["results"], strict=True), [(one["residual"], other["residual"])]
            ):
                assert torch.equal(mine, theirs), where


def test_a_frame_longer_than_its_own_capacity_is_noticed_before_it_leaves() -> None:
    frame = torch.zeros(8, dtype=torch.uint8)
    Round([message(3, frame)], [], "ring")
    with pytest.raises(AssertionError, match="8 bytes for rank 3 in ring, of at most 7"):
        Round([Message(3, frame, 7)], [], "ring")
