"""Merge planners: which neighbours in backward order to synchronise together.

Many small groups start early but pay a start-up each; few large ones pay little but start late. Every planner takes a
profile and a cost model and returns a plan: a partition of the backward sequence, and what a step with it will take.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spardl.config import check_merge
from spardl.planning import pareto
from spardl.planning.cost import CostModel
from spardl.planning.profile import Profile
from spardl.planning.timeline import Timeline, predict

Planner = Callable[[Profile, CostModel], "Plan"]

# Two partitions whose times differ by no more than this, relatively, end at the same time.
ROUNDING = 1e-13


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups of parameter names in backward order, and the step that they are predicted to give."""

    planner: str
    groups: tuple[tuple[str, ...], ...]
    timeline: Timeline

    def digest(self) -> str:
        """The partition in 64 characters: ranks that hold the same one have the same plan."""
        return hashlib.sha256(json.dumps(self.groups).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "planner": self.planner,
            "groups": [list(group) for group in self.groups],
            "iteration_s": self.timeline.iteration,
            "exposed_s": self.timeline.exposed,
            "digest": self.digest(),
        }


def exact(profile: Profile, cost: CostModel) -> Plan:
    """The best partition there is under this cost model (see `pareto`), in as few groups as that takes."""
    halves = (of_size(max(1, profile.elements >> shift)) for shift in range(1, 9))
    rivals = (single, layer, omgs, mgwfbp, *halves)
    known = min(rival(profile, cost).timeline.end for rival in rivals)
    counts = pareto.search(profile, cost, known).counts
    return _plan("exact", profile, cost, _without_needless_groups(profile, cost, counts))


def omgs(profile: Profile, cost: CostModel) -> Plan:
    """The published greedy: merge a group with the next layer if waiting for it costs less than a start-up.

    Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs",
    INFOCOM 2020. The released code always merges the first two tensors, unseen by its own model; here they are judged
    like the others. Not optimal: where every single layer is shorter than a start-up it merges the whole model.
    """
    counts: list[int] = []
    channel = 0.0  # when the closed groups leave it
    count, elements, ready = 1, profile.layers[0].elements, profile.layers[0].seconds
    for following in profile.layers[1:]:
        both = elements + following.elements
        selected = ready + cost.stall(elements)
        queueing = max(channel, selected) - selected
        longer = cost.stall(both) - cost.stall(elements) - cost.stall(following.elements)
        if following.seconds + longer - queueing < _saving(cost, elements, following.elements):
            count, elements, ready = count + 1, both, ready + following.seconds
        else:
            counts.append(count)
            channel = max(channel, selected) + cost.occupation(elements)
            count, elements, ready = 1, following.elements, selected + following.seconds
    return _plan("omgs", profile, cost, (*counts, count))


def mgwfbp(profile: Profile, cost: CostModel) -> Plan:
    """The greedy for dense gradients, which knows of no stalls: merge a group with the next layer unless that is ready
    only after the group's exchange has ended, or so long after it could start that a start-up is cheaper.

    Shi et al., "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019.
    """
    counts: list[int] = []
    channel = 0.0
    count, elements, ready = 1, profile.layers[0].elements, profile.layers[0].seconds
    for following in profile.layers[1:]:
        start = max(channel, ready)
        end = start + cost.occupation(elements)
        ready += following.seconds
        if ready < end and ready - start < _saving(cost, elements, following.elements):
            count, elements = count + 1, elements + following.elements
        else:
            counts.append(count)
            channel = end
            count, elements = 1, following.elements
    return _plan("mgwfbp", profile, cost, (*counts, count))


def layer(profile: Profile, cost: CostModel) -> Plan:
    """Every tensor on its own."""
    return _plan("layer", profile, cost, (1,) * len(profile.layers))


def single(profile: Profile, cost: CostModel) -> Plan:
    """The whole model in one group, after backward."""
    return _plan("single", profile, cost, (len(profile.layers),))


def of_size(elements: int) -> Planner:
    """Close a group as soon as it holds `elements`: the planner `size:N`."""

    def planner(profile: Profile, cost: CostModel) -> Plan:
        counts, held, count = [], 0, 0
        for layer in profile.layers:
            held, count = held + layer.elements, count + 1
            if held >= elements:
                counts.append(count)
                held = count = 0
        return _plan(f"size:{elements}", profile, cost, (*counts, count) if count else tuple(counts))

    return planner


PLANNERS: dict[str, Planner] = {"exact": exact, "omgs": omgs, "mgwfbp": mgwfbp, "layer": layer, "single": single}


def planner_of(name: str) -> Planner:
    """The planner of this name; `size:N` closes a group as soon as it holds N elements."""
    check_merge("merge", name)
    kind, _, number = name.partition(":")
    return of_size(int(number)) if number else PLANNERS[kind]


def plan(name: str, profile: Profile, cost: CostModel) -> Plan:
    """The plan that the planner of this name makes."""
    return planner_of(name)(profile, cost)


def _without_needless_groups(profile: Profile, cost: CostModel, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Merge neighbours where the step ends no later for it, the last ones first: what can leave early still does."""
    limit = predict(profile, cost, counts).end * (1 + ROUNDING)
    for place in range(len(counts) - 2, -1, -1):
        merged = (*counts[:place], counts[place] + counts[place + 1], *counts[place + 2 :])
        if predict(profile, cost, merged).end <= limit:
            counts = merged
    return counts


def _saving(cost: CostModel, first: int, second: int) -> float:
    """What one exchange saves over two: a start-up."""
    return cost.occupation(first) + cost.occupation(second) - cost.occupation(first + second)


def _plan(planner: str, profile: Profile, cost: CostModel, counts: tuple[int, ...]) -> Plan:
    names = iter(layer.name for layer in profile.layers)
    groups = tuple(tuple(next(names) for _ in range(count)) for count in counts)
    return Plan(planner, groups, predict(profile, cost, counts))
