"""Throttle: as many entries as the line carries while training computes, the same on all ranks."""

import math

import torch

from spardl.collectives.program import AllReduce
from spardl.host import download
from spardl.sync.fellows import Fellows
from spardl.transport.base import Transport

EVERY = 4  # exchanges from one adjustment to the next
FILLED = 0.9  # of the time that an exchange has: more would be waited for in every slow step
LARGEST_CHANGE = 2.0


class Throttle:
    """A density between a floor and a ceiling, adjusted by how long exchanges take and how long they may.

    Time is each rank's own; the rank with the least to spare decides for all, so that they stay the same.
    """

    def __init__(self, floor: float, ceiling: float) -> None:
        self.floor, self.ceiling = floor, ceiling
        self.begin()

    def begin(self) -> None:
        """Know nothing, as at the start: where ranks may know different things."""
        self.density = math.sqrt(self.floor * self.ceiling)
        self._ratios: list[float] = []  # time there was, over time it took

    def observe(self, *, took: float, had: float) -> None:
        """An exchange took so many seconds, and had so many until it was waited for."""
        self._ratios.append(had / took if took > 0 else LARGEST_CHANGE)

    @property
    def is_due(self) -> bool:
        """Whether enough is known; the same on all ranks."""
        return len(self._ratios) >= EVERY

    def adjust(self, transport: Transport, fellows: Fellows | None = None) -> None:
        """Agree on another density, also with the other parts of a model. Collective: one all-reduce of a number per
        rank, and one more among fellows."""
        middle = sorted(self._ratios)[len(self._ratios) // 2]
        ratios = torch.zeros(transport.workers, device=transport.device)
        ratios[transport.rank] = middle
        transport.perform(AllReduce(ratios, name="agreement on the density"))
        transport.arrive()
        least = float(download(ratios.min()))
        self.apply(least if fellows is None else fellows.least(least))

    def apply(self, ratio: float) -> None:
        """The rank with the least to spare had so many times what it needed."""
        factor = min(LARGEST_CHANGE, max(1 / LARGEST_CHANGE, FILLED * ratio))
        self.density = min(self.ceiling, max(self.floor, self.density * factor))
        self._ratios.clear()
