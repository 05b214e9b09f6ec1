"""Pace: how many local steps each rank takes from one exchange to the next, so that a slow one keeps nobody waiting."""

import statistics

import torch

from spardl.collectives.program import AllReduce
from spardl.transport.base import Transport
from spardl.update import fitted_steps

FIRST, EVERY = 2, 8  # the first exchange after which counts are agreed on, and how many come between later ones
REMEMBERED = 64  # steps, of which the median counts


class Pace:
    """Counts by rank, the same on all ranks, made of how long each of them computes for a step.

    A rank looks at its own count alone: an exchange waits until everybody has offered, however many steps that took. So
    a change need not come at the same time everywhere, and takes nothing but one all-reduce of a number per rank.
    """

    def __init__(self, every: int, workers: int) -> None:
        self.counts = [every] * workers
        self._every = every
        self._agreed: list[int] | None = None  # for after the exchange that is under way
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        """A step of this rank has taken so long, from the end of the one before, and without waiting for others."""
        self._seconds.append(seconds)
        del self._seconds[:-REMEMBERED]

    def is_due(self, exchange: int) -> bool:
        """Whether counts are to be agreed on after this exchange, numbered from 1; the same on all ranks."""
        return exchange == FIRST or exchange % EVERY == 0

    def agree(self, transport: Transport) -> None:
        """Make counts of what all ranks have measured. Collective."""
        seconds = torch.zeros(transport.workers, device=transport.device)
        seconds[transport.rank] = statistics.median(self._seconds) if self._seconds else 0.0
        transport.perform(AllReduce(seconds, name="agreement on local steps"))
        self._agreed = fitted_steps(self._every, seconds.tolist())

    def apply(self) -> None:
        """The exchange has been fetched: what was agreed on beside it counts from now on."""
        if self._agreed is not None:
            self.counts, self._agreed = self._agreed, None
