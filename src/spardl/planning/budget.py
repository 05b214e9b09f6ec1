"""Budget: so many seconds and no more, of which all ranks see as much left."""

import time
from collections.abc import Callable

from spardl.agreement import Gather, gather_values


class Budget:
    """Seconds that begin to run out when it is made."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ends = clock() + seconds

    def left(self, gather: Gather) -> float:
        """Seconds that are left on the rank that has least, below 0 when they are over. Collective."""
        return float(min(gather_values(gather, self._ends - self._clock())))
