"""LAGS: as many entries of each group as the backward of the next group hides, and how good a selection was.

Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence Guarantees",
ECAI 2020. The released code computes these densities and then ignores them.
"""

import bisect
import itertools
import math

import torch
from torch import Tensor

from spardl.config import check_density
from spardl.errors import ConfigError
from spardl.planning.cost import Cost, DensityCost
from spardl.planning.timeline import Timeline


def densities(
    timeline: Timeline, exchange: DensityCost, dense: Cost, *, floor: float = 0.001, ceiling: float = 0.1
) -> tuple[float, ...]:
    """One density per group, in the timeline's order, between `floor` and `ceiling`, or 1 for dense.

    A group may take as long as the backward of the next group, less its own selection; nothing hides the last one.
    It goes dense where that fits, or takes no longer than the sparse exchange would. `exchange` must not fall as
    density rises. Ranks that give the same numbers get the same densities.
    """
    check_density(floor)
    check_density(ceiling)
    if floor > ceiling:
        raise ConfigError(f"the floor of densities, {floor}, is above their ceiling, {ceiling}; swap them.")
    stages = timeline.stages
    hides = [
        max(0.0, following.backward.length - stage.selection.length) for stage, following in itertools.pairwise(stages)
    ]
    return tuple(
        _density(stage.elements, hide, exchange, dense, floor, ceiling)
        for stage, hide in zip(stages, [*hides, 0.0], strict=True)
    )


def _density(elements: int, hide: float, exchange: DensityCost, dense: Cost, floor: float, ceiling: float) -> float:
    """The largest density whose exchange takes at most `hide` seconds, to one entry."""
    least, most = max(1, math.ceil(floor * elements)), math.floor(ceiling * elements)
    counts = range(least, most + 1)
    fitting = bisect.bisect_right(counts, hide, key=lambda count: exchange(elements, count / elements))
    if fitting == 0:
        density = floor
    elif fitting == len(counts):
        density = ceiling
    else:
        density = counts[fitting - 1] / elements
    return 1.0 if dense(elements) <= max(hide, exchange(elements, density)) else density


def delta(accumulated: Tensor, sent: Tensor, count: int) -> float:
    """How much a selection left behind, compared with random choice: 1 is as bad as chance, 0 is nothing left.

    `accumulated` and `sent` are sums over ranks, `count` the entries that each rank chose. The convergence proof of
    LAGS assumes at most 1. Chance is taken in expectation: k of n random entries leave (1 - k/n) of the squared norm.
    """
    if accumulated.shape != sent.shape:
        raise ConfigError(
            f"what was sent has shape {list(sent.shape)}, what was accumulated {list(accumulated.shape)};"
            " give both sums over the same group."
        )
    total = accumulated.double()
    left = float(torch.sum((total - sent.double()) ** 2))
    chance = (1 - min(1.0, count / max(1, total.numel()))) * float(torch.sum(total**2))
    if left == 0:
        return 0.0
    return left / chance if chance > 0 else math.inf
