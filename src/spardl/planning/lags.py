"""LAGS: as many entries of each group as the backward of the next group hides.

Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence Guarantees",
ECAI 2020. The released code computes these densities and then ignores them.
"""

import bisect
import itertools
import math

from spardl.density import check_density
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
