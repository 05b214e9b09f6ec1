"""Virtual time: what will happen, and in which order."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

Act = Callable[[int, Any], object]


class Clock:
    """Events in virtual time: the earliest first, at the same time the lowest rank's first, of one rank as scheduled.

    So the order in which ranks schedule their events decides nothing. Each event costs one push and one pop of a heap.
    """

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Act, Any]] = []
        self._scheduled = itertools.count()
        self.now = 0.0

    def at(self, time: float, rank: int, act: Act, value: Any) -> None:
        """Call `act(rank, value)` at `time`, which must not lie in the past."""
        heapq.heappush(self._events, (time, rank, next(self._scheduled), act, value))

    def run(self) -> None:
        """Let everything happen, also what is scheduled meanwhile."""
        events = self._events
        while events:
            self.now, rank, _, act, value = heapq.heappop(events)
            act(rank, value)
