"""Latency where the kernel cannot emulate it: any transport, whose messages take a given time longer.

A rank waits `latency` seconds after each round that brought it something, and 2(P-1) times that after an all-reduce,
which is a ring's. Every method is treated alike: a message is late by the same time whoever sent it. The wait begins
when the rank has its messages, so one that comes late to a round waits as well. Texts are not delayed.
"""

import time
from typing import Any

from spardl.collectives.program import AllReduce, Operation
from spardl.errors import ConfigError
from spardl.metrics import Traffic
from spardl.transport.base import Transport
from spardl.transport.ring import ring_steps


class DelayedTransport:
    """`inner` with `latency` seconds on top of every step that a message takes. The waits count as waiting."""

    def __init__(self, inner: Transport, latency: float) -> None:
        if not latency >= 0:
            raise ConfigError(f"a latency of {latency} s cannot be waited for; give 0 or more.")
        self.rank, self.workers, self.device = inner.rank, inner.workers, inner.device
        self.traffic: Traffic = inner.traffic  # one account for both
        self._inner = inner
        self._latency = latency

    @property
    def checks(self) -> bool:
        """Whether messages carry checksums."""
        return self._inner.checks

    @checks.setter
    def checks(self, whether: bool) -> None:
        self._inner.checks = whether

    def perform(self, operation: Operation) -> Any:
        arrived = self._inner.perform(operation)
        started = time.perf_counter()
        time.sleep(self._latency * self._steps(operation))
        waited = time.perf_counter() - started
        self.traffic.count(rounds=0, messages=0, sent=0, received=0, seconds=waited, transferring=0.0)
        return arrived

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order, without delay."""
        return self._inner.gather_texts(text)

    def arrive(self) -> None:
        """Return when all is over inside."""
        self._inner.arrive()

    def close(self) -> None:
        """Close the transport inside."""
        self._inner.close()

    def _steps(self, operation: Operation) -> int:
        """Messages that this rank waits for, one after the other."""
        if isinstance(operation, AllReduce):
            return ring_steps(self.workers)
        return 1 if operation.receive else 0
