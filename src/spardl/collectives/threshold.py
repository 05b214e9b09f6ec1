"""One threshold for the whole model, steered so that the number of selected entries stays at its target."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from spardl.collectives.snapshot import FLOAT32, Snapshot
from spardl.sparse import Ints

SHIFT = 19  # of a float32's bits: 16 bins to an octave
REACH = 32  # bins to either side of the threshold
BINS = 2 * REACH
TREND = 0.2  # weight of the latest move in the running trend
LOWEST, HIGHEST = -104.0, 88.7  # logarithms of what float32 holds


class Controller(Protocol):
    """All ranks feed it the same numbers, so that their thresholds are equal without a message."""

    threshold: float

    def learn(self, selected: int, target: int, histogram: Ints) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Snapshot) -> None: ...


class Published:
    """ExDyna's rule: half a percent up or down a step, an eighth of a percent inside the band.

    The released code tests its inner band against 0 instead of 1, so that its threshold only ever rises there; this is
    the rule as intended. It needs hundreds of steps to find its level.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def learn(self, selected: int, target: int, histogram: Ints) -> None:
        ratio = selected / target
        if ratio > 1.1:
            self.threshold = min(1.005 * self.threshold, FLOAT32)
        elif ratio <= 1 / 1.1:
            self.threshold *= 0.995
        else:
            self.threshold = min(self.threshold * (1.00125 if ratio > 1 else 0.9987), FLOAT32)

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def load_state_dict(self, saved: Snapshot) -> None:
        self.threshold = _saved_threshold(saved)


class Quantile:
    """The threshold that would have been right in this step, continued along its trend.

    Each worker counts its partition's magnitudes in bins around the threshold; their sum tells where exactly `target`
    entries lie above. The trend makes up for the step of delay while gradients grow or shrink.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.level: float | None = None
        self.trend = 0.0

    def learn(self, selected: int, target: int, histogram: Ints) -> None:
        level = math.log(_level(first_bin(self.threshold), histogram, target))
        if self.level is not None:
            self.trend += TREND * (level - self.level - self.trend)
        self.level = level
        self.threshold = float(np.float32(math.exp(min(level + self.trend, HIGHEST))))

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "level": self.level, "trend": self.trend}

    def load_state_dict(self, saved: Snapshot) -> None:
        level = saved.number("level", least=LOWEST, most=HIGHEST) if saved.maybe("level") else None
        trend = saved.number("trend", least=LOWEST - HIGHEST, most=HIGHEST - LOWEST)
        self.threshold, self.level, self.trend = _saved_threshold(saved), level, trend


def _saved_threshold(saved: Snapshot) -> float:
    """A threshold from a state: other ranks' entries are compared with it as float32."""
    return saved.number("threshold", least=0.0, most=FLOAT32)


CONTROLLERS: dict[str, Callable[[float], Controller]] = {"published": Published, "quantile": Quantile}


def first_bin(threshold: float) -> int:
    """The lowest of the bins around this threshold."""
    return max(1, (int(np.float32(threshold).view(np.uint32)) >> SHIFT) - REACH)


def _level(first: int, histogram: Ints, target: int) -> float:
    """The magnitude that `target` entries reach, by the bins' counts; at most the bins' range away."""
    above = np.concatenate((np.cumsum(histogram[::-1])[::-1], [0]))  # above[i]: entries in bin i or higher
    if above[0] <= target:
        key = first << SHIFT
    else:
        bin_ = int(np.flatnonzero(above > target)[-1])
        share = (target - above[bin_ + 1]) / histogram[bin_]
        key = int((first + bin_ + 1 - share) * (1 << SHIFT))
    return float(np.uint32(min(key, 0x7F7FFFFF)).view(np.float32))
