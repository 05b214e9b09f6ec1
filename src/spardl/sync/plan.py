"""GroupPlan: the one description of how a group of tensors is synchronised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spardl.collectives.method import NoOptions
from spardl.collectives.methods.registry import method_class
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import StateError


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor as synchronisation knows it: its name, its number of elements, and with whom it may be grouped.

    Tensors of different kinds never share a group: they do not compete for the same entries.
    """

    name: str
    elements: int
    kind: str = ""


@dataclass(frozen=True)
class GroupPlan:
    """Members that are synchronised together, in order, and how.

    method, options  who does it; `dense` is a method like the others
    density          the share of entries that a step may send, over steps
    values, indices  what travels
    residuals        what becomes of entries that did not survive
    """

    members: tuple[Member, ...]
    method: str
    options: NoOptions
    density: DensitySchedule
    values: str = "bf16"
    indices: str = "auto"
    residuals: str = "carry"

    @property
    def title(self) -> str:
        """What statistics and errors call the group."""
        first, last = self.members[0].name, self.members[-1].name
        return first if first == last else f"{first} .. {last}"

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def elements(self) -> int:
        return sum(member.elements for member in self.members)

    @property
    def is_dense(self) -> bool:
        """Whether every entry is sent in every step."""
        return method_class(self.method).about.dense


def plan_group(config: SyncConfig, members: Sequence[Member], workers: int, density: float | None = None) -> GroupPlan:
    """What `config` makes of these members: small groups, and a single worker, go dense.

    `density` is the group's own, once the schedule has reached its target.
    """
    plan = GroupPlan(
        tuple(members),
        config.method,
        config.options,
        config.schedule.settling_at(density),
        config.values,
        config.indices,
        config.residuals,
    )
    if workers == 1 or plan.elements < config.dense_below:
        return densely(plan)
    return plan


def densely(plan: GroupPlan) -> GroupPlan:
    """A plan for the same members by which every entry is sent in every step."""
    if plan.is_dense:
        return plan
    return replace(plan, method="dense", options=method_class("dense").Options())


def plan_model(config: SyncConfig, members: Sequence[Member], workers: int) -> list[GroupPlan]:
    """The groups of a whole model before anything is known about its backward pass."""
    plans = []
    for kind in dict.fromkeys(member.kind for member in members):
        alike = [member for member in members if member.kind == kind]
        runs = partition(alike, config.groups) if isinstance(config.groups, int) else [alike]
        plans += [plan_group(config, run, workers) for run in runs]
    return plans


def partition(members: Sequence[Member], limit: int) -> list[list[Member]]:
    """Runs of members with at most `limit` elements together, or one member that is larger."""
    groups: list[list[Member]] = []
    size = 0
    for member in members:
        if not groups or size + member.elements > limit:
            groups.append([])
            size = 0
        groups[-1].append(member)
        size += member.elements
    return groups


def arranged(
    groups: Sequence[Sequence[str]],
    densities: Sequence[float | None],
    config: SyncConfig,
    sizes: Mapping[str, int],
    workers: int,
) -> list[GroupPlan]:
    """Plans for groups that were saved by name, each with its own density or None.

    Raises:
        StateError: they are not all of these tensors, each once.
    """
    named = [name for names in groups for name in names]
    if sorted(named) != sorted(sizes) or len(densities) != len(groups) or not all(groups):
        raise StateError("this state has groups of other parameters; load the state of the same model.")
    return [
        plan_group(config, [Member(name, sizes[name]) for name in names], workers, density)
        for names, density in zip(groups, densities, strict=True)
    ]
