"""Synchronizer: all groups of one model on one rank, and steps that commit all of them or none.

State is keyed by name: whoever is regrouped keeps its residual and its velocity, bit for bit.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from spardl.collectives.program import AllReduce, Program
from spardl.host import quotient
from spardl.kernels import Kernels
from spardl.kernels.cpu.crew import Crew
from spardl.memory.health import Health, read
from spardl.metrics import GroupStats, SyncStats
from spardl.sync import step as steps
from spardl.sync.group import Group
from spardl.sync.plan import GroupPlan


@dataclass(slots=True)
class Kept:
    """What survives when groups change: one tensor's residual and velocity, in memory order."""

    residual: Tensor
    velocity: Tensor | None = None
    started: bool = False  # whether the velocity counts


class Synchronizer:
    """Groups, their memory, and the step that they are in. It opens no connection: whoever owns it drives its programs.

    `steps` counts steps so far, also those that did not count. `crowded` ranks share cores, so that nothing is gained
    by adding gradients up while messages travel. `of_weights`: what is exchanged is how far shared weights are from a
    rank's own, and nothing is kept here between steps but controllers.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        *,
        kernels: Kernels,
        device: torch.device | str = "cpu",
        momentum: bool = False,
        of_weights: bool = False,
        crew: Crew | None = None,
    ) -> None:
        self.rank, self.workers = rank, workers
        self.groups: list[Group] = []
        self.steps = self.skipped = self._counted = 0
        self.has_momentum = momentum
        self.of_weights = of_weights
        self.device = torch.device(device)
        self.crew = crew or Crew()
        self._kernels = kernels
        self._loose: dict[str, Kept] = {}  # of names that are in no group now
        self._common: dict[str, Any] = {}  # what methods of one model share
        self._past = GroupStats("past groups", 0)
        self.health = Health()  # of tensors that are in no group
        self._begun: list[Group] = []  # of this step; undone last first, since groups may share a controller

    # --- groups ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> list[GroupPlan]:
        """How groups are synchronised now, in their order."""
        return [group.plan for group in self.groups]

    def regroup(self, plans: Iterable[GroupPlan], *, place: tuple[int, int] | None = None) -> None:
        """Arrange members like this from the next step on. Controllers of groups that change start anew.

        `place` is this rank's and how many there are, where that has changed.
        """
        if place is not None:
            (self.rank, self.workers), self._common = place, {}
        for group in list(self.groups):
            self._dissolve(group)
        self.groups = [self._form(plan) for plan in plans]

    def include(self, plan: GroupPlan) -> Group:
        """Add one group, of members that were in none or in others; those others dissolve."""
        wanted = set(plan.names)
        for group in list(self.groups):
            if wanted & group.offsets.keys():
                self._dissolve(group)
        group = self._form(plan)
        self.groups.append(group)
        return group

    def exclude(self, group: Group) -> None:
        """Drop a group and all that it holds."""
        self._dissolve(group)
        for name in group.offsets:
            self._loose.pop(name, None)

    def _form(self, plan: GroupPlan) -> Group:
        group = Group(
            plan,
            rank=self.rank,
            workers=self.workers,
            kernels=self._kernels,
            device=self.device,
            momentum=self.has_momentum,
            of_weights=self.of_weights,
            crew=self.crew,
            common=self._common,
        )
        for name in group.offsets:
            if name in self._loose:
                self.restore(group, name, self._loose.pop(name))
        return group

    def _dissolve(self, group: Group) -> None:
        assert group.outcome is None, "groups change only between steps"
        self._loose.update(self._kept_of(group))
        self._past.include(group.stats)
        self.groups.remove(group)

    def _kept_of(self, group: Group) -> dict[str, Kept]:
        if self.of_weights:
            return {}
        started = group.velocity.started if group.velocity is not None else ()
        return {
            member.name: Kept(group.residual(member), group.velocity_of(member), member.name in started)
            for member in group.plan.members
        }

    def kept(self) -> dict[str, Kept]:
        """A copy of every residual and velocity, by name."""
        found = {name: kept for group in self.groups for name, kept in self._kept_of(group).items()}
        return found | self._loose

    def restore(self, group: Group, name: str, kept: Kept) -> None:
        """Set what a group holds for one of its members. Between steps."""
        group.write(name, kept.residual, kept.velocity)
        if group.velocity is not None:
            (group.velocity.started.add if kept.started else group.velocity.started.discard)(name)

    def group_with(self, name: str) -> Group | None:
        """The group that a tensor is in."""
        return next((group for group in self.groups if name in group.offsets), None)

    def knows(self, name: str) -> bool:
        """Whether a tensor of this name is in any group."""
        return self.group_with(name) is not None

    def holds(self, name: str) -> bool:
        """Whether anything of a tensor's gradients may be left here after the last step: a residual, or a velocity."""
        group = self.group_with(name)
        if group is None:
            return name in self._loose
        dense = group.plan.is_dense or group.plan.density.at(max(0, self.steps - 1)) >= 1.0
        return not dense or (group.velocity is not None and name in group.velocity.started)

    def set_velocity(self, name: str, velocity: Tensor) -> None:
        """Let this tensor's momentum go on from here. Between steps."""
        group = self.group_with(name)
        if group is not None and group.velocity is not None:
            group.write(name, velocity=velocity)
            group.velocity.started.add(name)
        elif name in self._loose:
            self._loose[name].velocity, self._loose[name].started = velocity, True

    # --- one step -------------------------------------------------------------------------------------------------

    def opens(self, group: Group) -> None:
        """This group takes part in the step from now on."""
        self._begun.append(group)

    def is_poisoned(self) -> bool:
        """Whether some rank's gradient was not finite. If a device has to be asked, the host waits once, for all that
        this step's groups want to know."""
        read([self.health, *(group.transaction.health for group in self._begun)])
        for group in self._begun:
            if group.outcome is not None:
                group.outcome.poisoned = group.transaction.health.known_poisoned
        return any(each.known_poisoned for each in (self.health, *(group.transaction.health for group in self._begun)))

    def finish(self, *, poisoned: bool = False, instead: float = torch.nan) -> bool:
        """End the step: commit all groups, or, if any is poisoned, roll all back and hand out `instead`.

        Returns whether the step counts. If not, residuals, velocities and controllers are as they were before it.
        """
        fine = not (self.is_poisoned() or poisoned)
        self.health.reset()
        self.steps += 1
        self.skipped += not fine
        self._counted += fine
        with record_function("spardl::commit"):
            while self._begun:
                group, started = self._begun.pop(), time.perf_counter()
                if fine:
                    steps.commit(group)
                else:
                    steps.refuse(group, value=instead)
                group.stats.seconds_selecting += time.perf_counter() - started
        return fine

    def abandon(self) -> None:
        """Roll back whatever has begun, so that residuals are intact after a failure."""
        self.health.reset()
        while self._begun:
            steps.roll_back(self._begun.pop())

    # --- leaving --------------------------------------------------------------------------------------------------

    def drain(self, names: Collection[str]) -> Program[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Momentum ends here, for whoever takes it over.

        Returns residuals (which have been through momentum, so only these `names`' owner can apply them) and
        velocities that count, both as means over ranks, by name. They are zero here from now on.
        """
        residuals: dict[str, Tensor] = {}
        velocities: dict[str, Tensor] = {}
        for name, kept in self.kept().items():
            group = self.group_with(name)
            if group is None or kept.velocity is None:
                continue
            yield AllReduce(kept.velocity)
            yield AllReduce(kept.residual)
            if name in names:
                residuals[name] = quotient(kept.residual, self.workers)
                if kept.started:
                    velocities[name] = quotient(kept.velocity, self.workers)
                group.write(name, torch.zeros_like(kept.residual))
        self.has_momentum = False
        self.regroup(self.plan)
        return residuals, velocities

    def stats(self) -> SyncStats:
        """What each present group has done, and all groups of all times together."""
        return SyncStats([group.stats for group in self.groups], self._past, self._counted, self.skipped)
