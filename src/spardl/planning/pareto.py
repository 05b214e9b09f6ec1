"""The best partition of a backward pass into groups, under any cost model.

The published greedy compares only the next layer's wait with one start-up and is not optimal in its own model. Here
every boundary between layers keeps all ways to get there that may still win: pairs of (seconds backward has stood
still, time the channel is free) of which none is worse than another in both. Costs depend on a group alone and both
numbers only ever push later ones back, so a pair that another one beats in both can never win, and the result is exact.

Worst case exponential, as any such set; in practice few pairs survive. A pair is also dropped when the most favourable
rest of the step could not bring it below the best partition known so far.
"""

from dataclasses import dataclass

import numpy as np

from spardl.planning.cost import CostModel, Floats
from spardl.planning.profile import Profile
from spardl.sparse import Ints

# A bound and the sum that it bounds are rounded differently.
SLACK = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """Layers per group of the best partition, and how many pairs all boundaries kept together and at most."""

    counts: tuple[int, ...]
    labels: int
    widest: int


def search(profile: Profile, cost: CostModel, known: float) -> Found:
    """The partition whose step ends first. `known` is when the step of some partition ends, since backward began."""
    ready = np.cumsum([0.0, *(layer.seconds for layer in profile.layers)])
    stall, occupation = _segment_costs(profile, cost)
    last = len(profile.layers)
    rest_stall, rest_occupation = _least_rest(stall), _least_rest(occupation)
    least_exchange = _least_last_exchange(occupation)
    limit = known * SLACK

    # Of every pair so far: the boundary it belongs to, its two numbers, and the pair it came from.
    boundaries, parents = np.zeros(1, np.int64), np.full(1, -1)
    stalls, channels = np.zeros(1), np.zeros(1)
    widest = 1
    for end in range(1, last + 1):
        stalled = stalls + stall[boundaries, end]
        finished = np.maximum(channels, ready[end] + stalled) + occupation[boundaries, end]
        soonest = ready[last] + stalled + rest_stall[end] + (least_exchange[end] if end < last else 0.0)
        promising = np.flatnonzero((finished + rest_occupation[end] <= limit) & (soonest <= limit))
        kept = promising[_undominated(stalled[promising], finished[promising])]
        widest = max(widest, len(kept))
        boundaries = np.concatenate([boundaries, np.full(len(kept), end)])
        stalls, channels = np.concatenate([stalls, stalled[kept]]), np.concatenate([channels, finished[kept]])
        parents = np.concatenate([parents, kept])
    finals = np.flatnonzero(boundaries == last)
    best = finals[np.argmin(np.maximum(channels[finals], ready[last] + stalls[finals]))]
    return Found(_counts(best, boundaries, parents), len(boundaries), widest)


def _segment_costs(profile: Profile, cost: CostModel) -> tuple[Floats, Floats]:
    """Stall and occupation of the group of layers [i, j), at [i, j]."""
    edges = np.cumsum([0, *(layer.elements for layer in profile.layers)]).tolist()
    stall, occupation = (np.full((len(edges), len(edges)), np.inf) for _ in range(2))
    for first in range(len(edges)):
        for end in range(first + 1, len(edges)):
            elements = edges[end] - edges[first]
            stall[first, end] = cost.stall(elements)
            occupation[first, end] = cost.occupation(elements)
    return stall, occupation


def _least_rest(costs: Floats) -> Floats:
    """The least that the groups after each boundary can cost together."""
    rest = np.zeros(len(costs))
    for first in range(len(costs) - 2, -1, -1):
        rest[first] = (costs[first, first + 1 :] + rest[first + 1 :]).min()
    return rest


def _least_last_exchange(occupation: Floats) -> Floats:
    """The least that the last group can cost if it begins at or after each boundary."""
    return np.minimum.accumulate(occupation[::-1, -1])[::-1]


def _undominated(stalls: Floats, channels: Floats) -> Ints:
    """Positions of the pairs that no other beats in both; of equal ones the first. In order of position."""
    order = np.lexsort((channels, stalls))
    before = np.minimum.accumulate(np.concatenate([[np.inf], channels[order][:-1]]))
    return np.sort(order[channels[order] < before])


def _counts(label: np.int64, boundaries: Ints, parents: Ints) -> tuple[int, ...]:
    """Follow parent links from a last pair back to the start."""
    counts = []
    while parents[label] >= 0:
        counts.append(int(boundaries[label] - boundaries[parents[label]]))
        label = parents[label]
    return tuple(reversed(counts))
