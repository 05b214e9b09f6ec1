"""Emulated latency: the same messages, each of them later by the same time."""

import time
from typing import Any

import pytest
import torch

from messages import message
from processes import on_processes
from programs import synchronized
from spardl.collectives.program import AllReduce, Operation, Round
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.metrics import Traffic
from spardl.transport.delayed import DelayedTransport
from spardl.transport.direct import DirectTransport

LATENCY = 0.01
FRAME = torch.zeros(8, dtype=torch.uint8)


class Instant:
    """A transport that takes no time and brings what was sent."""

    rank, workers, device = 0, 4, torch.device("cpu")

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.closed = False

    def perform(self, operation: Operation) -> Any:
        return [FRAME] if isinstance(operation, Round) and operation.receive else None

    def gather_texts(self, text: str) -> list[str]:
        return [text] * self.workers

    def arrive(self) -> None:
        self.arrived = True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("operation", "steps"),
    [
        (Round([message(1, FRAME)], [(1, 8)], "exchange"), 1),
        (Round([message(1, FRAME), message(2, FRAME)], [(1, 8), (2, 8)], "to two"), 1),
        (Round([message(1, FRAME)], [], "only sends"), 0),
        (AllReduce(torch.zeros(4)), 6),
    ],
)
def test_a_rank_waits_once_per_step_in_which_something_arrives(
    operation: Operation, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of one round travel at the same time; a ring of 4 passes 6 on; who only sends waits for nobody."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    DelayedTransport(Instant(), LATENCY).perform(operation)
    assert waits == pytest.approx([steps * LATENCY])


def test_what_was_waited_for_counts_as_waiting() -> None:
    """Not as transfer, and not as rounds or bytes."""
    transport = DelayedTransport(Instant(), LATENCY)
    transport.perform(Round([message(1, FRAME)], [(1, 8)], "exchange"))
    assert transport.traffic.seconds >= LATENCY
    assert (transport.traffic.seconds_transferring, transport.traffic.rounds, transport.traffic.bytes_sent) == (0, 0, 0)


def test_all_but_messages_is_the_transport_inside() -> None:
    inner = Instant()
    transport = DelayedTransport(inner, LATENCY)
    assert (transport.rank, transport.workers, transport.device) == (0, 4, torch.device("cpu"))
    assert transport.gather_texts("text") == ["text"] * 4
    transport.close()
    assert inner.closed


def test_a_latency_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="give 0 or more"):
        DelayedTransport(Instant(), -1.0)


def both_ways(rank: int, workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    config = SyncConfig(density=0.02)
    inner = DirectTransport(timeout=60)
    return synchronized(inner, config), synchronized(DelayedTransport(DirectTransport(timeout=60), 0.001), config)


def test_delay_changes_nothing_but_time() -> None:
    """Results, residuals, rounds and bytes are those of the transport inside."""
    for plain, delayed in on_processes(3, both_ways):
        assert all(torch.equal(one, other) for one, other in zip(plain["results"], delayed["results"], strict=True))
        assert torch.equal(plain["residual"], delayed["residual"])
        assert plain["moved"] == delayed["moved"]
