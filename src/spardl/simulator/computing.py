"""How long computing takes: on workers of different speed, and on workers that share cores."""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spardl.errors import ConfigError


@dataclass(frozen=True)
class Costs:
    """What synchronising costs a rank beside the network, in seconds. Nothing, unless somebody has measured it.

    per_step     of an exchange, whatever its size
    per_element  of the vector: adding the gradient up, selecting, writing the result
    per_round    of a round, whatever its size
    per_byte     that is sent or received: packing, checking, merging, and the host's own work for its line
    """

    per_step: float = 0.0
    per_element: float = 0.0
    per_round: float = 0.0
    per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} of {seconds} seconds cannot be simulated; give 0 or more.")


@dataclass(frozen=True)
class Machine:
    """Who computes: `costs` for all, `slower` by rank for those that are, and the number of cores that all ranks share.

    Ranks that share cores queue for them, in the order in which they ask.
    """

    costs: Costs = Costs()
    slower: Mapping[int, float] = field(default_factory=dict)
    cores: int | None = None

    def __post_init__(self) -> None:
        for rank, factor in self.slower.items():
            if not 0 < factor < math.inf:
                raise ConfigError(f"worker {rank} cannot be {factor} times slower; give a positive number.")
        if self.cores is not None and self.cores < 1:
            raise ConfigError(f"{self.cores} cores compute nothing; give 1 or more.")

    def seconds(self, rank: int, seconds: float) -> float:
        """What this much computing takes on a rank."""
        return seconds * self.slower.get(rank, 1.0)


class Cores:
    """Cores that some ranks share; whoever asks first gets the one that is free first."""

    def __init__(self, count: int | None) -> None:
        self._free = None if count is None else [0.0] * count

    def until(self, now: float, seconds: float) -> float:
        """When work of `seconds` that is there `now` will be done."""
        if self._free is None or not seconds:
            return now + seconds
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        return end
