"""Synchronizer: gradients in, averaged sparse gradients out.

State is keyed by parameter name. A *group* is a run of tensors that is synchronised together, with one accumulator and
one method. A step runs its groups one after the other, and then commits all of them or rolls all of them back.
"""

import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spardl import kernels
from spardl.accumulator import Accumulator, Momentum
from spardl.blocks import entries
from spardl.collectives.dense import Dense
from spardl.collectives.memory import Memory
from spardl.collectives.method import Method, Place, method_class
from spardl.collectives.program import AllReduce
from spardl.config import SyncConfig
from spardl.diagnosis import delta
from spardl.errors import ConfigError
from spardl.kernels.crew import Crew
from spardl.metrics import GroupStats, SyncStats
from spardl.sparse import Array, SparseBlocks
from spardl.transport.base import Transport, run
from spardl.wire.frame import Codec


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter as the synchronizer knows it."""

    name: str
    elements: int


@dataclass(frozen=True, slots=True)
class Part:
    """One member's gradient in one step: a flat tensor in memory order, which receives the averaged result.

    `unused` says that no rank's backward reached it: its residual waits, lest it be sent where DDP drops it.
    """

    name: str
    gradient: Tensor
    momentum: Momentum | None = None
    unused: bool = False


@dataclass(slots=True)
class _Saved:
    """What survives when groups change: one parameter's residual and velocity, in memory order."""

    residual: Tensor
    velocity: Tensor | None


@dataclass(slots=True)
class _Outcome:
    """A group's step between its gradients and its commit. `averages`: positions and values per part; dense: None."""

    parts: Sequence[Part]
    buffers: list[Tensor]
    controller: dict[str, Any] | None = None  # the method's state before its exchange, if that has begun
    averages: list[tuple[Array, Array]] | None = None


@dataclass
class Group:
    """Members in order, their accumulator and the method that synchronises it."""

    members: Sequence[Member]
    method: Method
    dense_method: Method
    memory: Memory
    stats: GroupStats
    density: float | None = None  # of its own, rather than the configuration's
    offsets: dict[str, int] = field(default_factory=dict)
    outcome: _Outcome | None = None


class Synchronizer:
    """All groups of one model on one rank."""

    def __init__(
        self,
        config: SyncConfig,
        transport: Transport,
        *,
        momentum: bool = False,
        device: torch.device | str = "cpu",
        crew: Crew | None = None,
    ) -> None:
        self.config = config
        self.transport = transport
        self.groups: list[Group] = []
        self.steps = 0
        self.poisoned = False
        self._momentum = momentum
        self._device = torch.device(device)
        self._kernels = kernels.for_device(self._device)
        self._crew = crew or Crew()
        self._loose: dict[str, _Saved] = {}
        self._common: dict[str, Any] = {}
        self._begun: list[Group] = []  # of this step; undone last first, since groups may share a controller
        self._scale = 1.0

    # --- groups ---------------------------------------------------------------------------------------------------

    def regroup(self, groups: Iterable[Sequence[Member]], densities: Sequence[float | None] | None = None) -> None:
        """Arrange members in these groups from the next step on; residuals and velocities move along, bit for bit.

        `densities` gives groups a density of their own.
        """
        for group in list(self.groups):
            self._dissolve(group)
        self.groups = [self._form(members) for members in groups]
        for group, density in zip(self.groups, densities or (), strict=False):
            group.density = density

    def group_of(self, members: Sequence[Member]) -> Group:
        """The group of exactly these members; made from the groups that held them, if it is not there yet."""
        wanted = {member.name for member in members}
        for group in list(self.groups):
            if set(group.offsets) == wanted:
                return group
            if wanted & set(group.offsets):
                self._dissolve(group)
        group = self._form(members)
        self.groups.append(group)
        return group

    def _form(self, members: Sequence[Member]) -> Group:
        sizes = tuple(member.elements for member in members)
        length, workers = sum(sizes), self.transport.workers
        title = members[0].name if len(members) == 1 else f"{members[0].name} .. {members[-1].name}"
        place = Place(self.transport.rank, workers, length, self.config, sizes, title, self._common)
        name = "dense" if workers == 1 or length < self.config.dense_below else self.config.method
        method = method_class(name)(place)
        dense_method = method if isinstance(method, Dense) else Dense(place)
        acc = Accumulator(
            method.layout,
            residuals=self.config.residuals,
            momentum=self._momentum,
            device=self._device,
            crew=self._crew,
        )
        stats = GroupStats(title, length, dense=method is dense_method)
        group = Group(members, method, dense_method, Memory(acc, Codec(self.config.values, self.config.indices)), stats)
        offset = 0
        for member in members:
            group.offsets[member.name] = offset
            if member.name in self._loose:
                self._restore(group, member.name, self._loose.pop(member.name))
            offset += member.elements
        return group

    def _dissolve(self, group: Group) -> None:
        assert group.outcome is None, "groups change only between steps"
        for member in group.members:
            self._loose[member.name] = self._save(group, member)
        self.groups.remove(group)

    def _save(self, group: Group, member: Member) -> _Saved:
        acc, offset = group.memory.acc, group.offsets[member.name]
        residual = torch.empty(member.elements, device=self._device)
        acc.read(offset, residual)
        if acc.velocity is None:
            return _Saved(residual, None)
        velocity = torch.empty_like(residual)
        acc.read_velocity(offset, velocity)
        return _Saved(residual, velocity)

    # --- one step -------------------------------------------------------------------------------------------------

    def begin(self, *, scale: float = 1.0) -> None:
        """Start a step. `scale` is the loss scale that gradients carry; residuals are kept without it."""
        assert not self._begun, "a step ends with finish() or abandon()"
        self._scale = scale
        self.poisoned = False

    def synchronize(self, group: Group, parts: Sequence[Part]) -> None:
        """Accumulate and exchange one group, or roll the step back."""
        try:
            self.accumulate(group, parts, later=not self._crew.crowded)
            self.exchange(group)
        except BaseException:
            self.abandon()
            raise

    def accumulate(self, group: Group, parts: Sequence[Part], *, later: bool = False) -> None:
        """Add one group's gradients, whose memory is ours until `finish`. Another group may be exchanged meanwhile.

        Added `later`, the exchange does it, in part while messages travel.
        """
        started = time.perf_counter()
        acc, offsets = group.memory.acc, group.offsets
        buffers = [_as_float(part.gradient) for part in parts]
        group.outcome = _Outcome(parts, buffers)
        self._begun.append(group)
        clip = self._clip(buffers)
        for part, buffer in zip(parts, buffers, strict=True):
            if part.unused:
                acc.hold(offsets[part.name], buffer)
            else:
                acc.add_later(offsets[part.name], buffer, clip / self._scale, part.momentum)
        if not later:
            acc.add_up()
        group.stats.seconds_selecting += time.perf_counter() - started

    def exchange(self, group: Group) -> None:
        """Exchange what was accumulated. After an error, `abandon` the step."""
        started, before = time.perf_counter(), self.transport.traffic.copy()
        sent, packed = group.memory.entries_sent, group.memory.seconds_packing
        assert group.outcome is not None
        group.outcome.controller = group.method.state_dict()
        try:
            self._exchange(group, group.outcome)
        except BaseException as error:
            error.add_note(f"while synchronising the group {group.stats.name}")
            raise
        group.stats.entries_sent += group.memory.entries_sent - sent
        packing = group.memory.seconds_packing - packed
        group.stats.observe(before, self.transport.traffic, time.perf_counter() - started, packing)

    def _exchange(self, group: Group, outcome: _Outcome) -> None:
        acc, parts = group.memory.acc, outcome.parts
        density = self._density(group)
        dense = group.stats.dense or density >= 1.0
        method = group.dense_method if dense else group.method
        if not method.about.by_blocks:
            acc.add_up()
        total = self._total(group) if not dense and self._is_diagnosed else None
        result = run(method.synchronize(group.memory, density), self.transport)
        if dense:
            acc.poisoned = not (self._kernels.all_finite(acc.values) and self._fits(group, parts))
            # What a ring sends, so that 32 bits per entry come out beside the sparse methods' figures.
            workers = self.transport.workers
            group.stats.entries_sent += 2 * group.stats.elements * (workers - 1) // workers
        elif not acc.poisoned:
            assert result is not None
            acc.settle(result)
            if total is not None:
                positions, values = (torch.as_tensor(each) for each in acc.natural(result))
                group.stats.delta = delta(total, positions, values, entries(density, total.numel()))
            outcome.averages = self._averages(group, parts, result)
            acc.poisoned = not all(self._is_finite(values) for _, values in outcome.averages)
        self.poisoned |= acc.poisoned

    def _density(self, group: Group) -> float:
        """A group's own density counts, except while the schedule is still above its target."""
        scheduled = self.config.density_at(self.steps)
        if group.density is None:
            return scheduled
        return max(group.density, scheduled) if scheduled > self.config.density_at(sys.maxsize) else group.density

    @property
    def _is_diagnosed(self) -> bool:
        return self.config.delta_every > 0 and self.steps % self.config.delta_every == 0

    def _total(self, group: Group) -> Tensor:
        """What all ranks have accumulated, in natural order."""
        total = torch.empty(group.stats.elements, device=self._device)
        group.memory.acc.read(0, total)
        if group.memory.acc.poisoned:
            total.fill_(torch.nan)
        self.transport.perform(AllReduce(total, name="diagnosis"))
        return total

    def _averages(self, group: Group, parts: Sequence[Part], result: SparseBlocks) -> list[tuple[Array, Array]]:
        """Positions and values to write, per part. Values may overflow where gradients have 16 bits."""
        averages = group.memory.acc.natural(result, self._factor)
        if len(parts) == len(group.members) == 1 and parts[0].gradient.dtype is torch.float32:
            return [averages]
        positions, values = (torch.as_tensor(each) for each in averages)
        firsts = [group.offsets[part.name] for part in parts]
        stops = [first + part.gradient.numel() for first, part in zip(firsts, parts, strict=True)]
        edges = torch.searchsorted(positions, torch.tensor([*firsts, *stops], device=positions.device)).tolist()
        cuts = zip(parts, firsts, edges[: len(parts)], edges[len(parts) :], strict=True)
        return [
            (positions[i:j] - first if first else positions[i:j], values[i:j].to(part.gradient.dtype))
            for part, first, i, j in cuts
        ]

    def _is_finite(self, values: Array) -> bool:
        if isinstance(values, Tensor) and values.dtype is not torch.float32:
            return bool(values.isfinite().all())
        return bool(self._kernels.all_finite(values))

    def _fits(self, group: Group, parts: Sequence[Part]) -> bool:
        """Whether the dense averages stay finite in gradients that have fewer bits than ours."""
        for part in parts:
            if part.gradient.dtype is not torch.float32:
                total = torch.empty(part.gradient.numel(), device=self._device)
                group.memory.acc.read(group.offsets[part.name], total)
                if not torch.isfinite((total * self._factor).to(part.gradient.dtype)).all():
                    return False
        return True

    @property
    def _factor(self) -> float:
        """Sums become averages, in the unit of the gradients."""
        return self._scale / self.transport.workers

    def finish(self) -> bool:
        """End the step: write the averages into the gradients, or, if any rank's gradient was not finite, NaN.

        Returns whether the step counts. If not, residuals, velocities and controllers are as they were before it.
        """
        self.steps += 1
        while self._begun:
            group = self._begun.pop()
            started = time.perf_counter()
            assert group.outcome is not None
            if self.poisoned:
                self._refuse(group, group.outcome)
            else:
                self._deliver(group, group.outcome)
            group.outcome = None
            group.stats.seconds_selecting += time.perf_counter() - started
        return not self.poisoned

    def abandon(self) -> None:
        """Roll back whatever has begun, so that residuals are intact after a failure."""
        while self._begun:
            group = self._begun.pop()
            assert group.outcome is not None
            self._roll_back(group, group.outcome)
            group.outcome = None

    def _deliver(self, group: Group, outcome: _Outcome) -> None:
        group.stats.steps += 1
        group.memory.acc.commit(dense=outcome.averages is None)
        if outcome.averages is None:
            group.stats.entries += group.stats.elements
            for part, buffer in zip(outcome.parts, outcome.buffers, strict=True):
                torch.mul(buffer, self._factor, out=buffer)
                if buffer is not part.gradient:
                    part.gradient.copy_(buffer)
            return
        for part, (positions, values) in zip(outcome.parts, outcome.averages, strict=True):
            group.stats.entries += len(positions)
            if part.gradient.dtype is torch.float32:
                self._kernels.put_only(part.gradient, positions, values)
            else:
                part.gradient.zero_()
                part.gradient[positions] = values

    def _refuse(self, group: Group, outcome: _Outcome) -> None:
        group.stats.skipped += 1
        self._roll_back(group, outcome)
        for part in outcome.parts:
            part.gradient.fill_(torch.nan)

    def _roll_back(self, group: Group, outcome: _Outcome) -> None:
        group.memory.acc.rollback()
        if outcome.controller is not None:
            group.method.load_state_dict(outcome.controller)

    def _clip(self, buffers: Sequence[Tensor]) -> float:
        """The factor that brings this group's own gradient down to the allowed norm."""
        if self.config.local_clip is None:
            return 1.0
        norms = torch.stack([torch.linalg.vector_norm(buffer) for buffer in buffers])
        norm = float(torch.linalg.vector_norm(norms)) / self._scale
        allowed = self.config.local_clip / self.transport.workers**0.5
        return min(1.0, allowed / norm) if norm > 0 else 1.0

    # --- leaving --------------------------------------------------------------------------------------------------

    def go_dense(self) -> None:
        """Send everything from now on, starting with what residuals hold."""
        self.config = replace(self.config, density=1.0)

    def drain(self, names: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Momentum ends here, for whoever takes it over. Collective.

        Returns residuals (which have been through momentum, so only these `names`' owner can apply them) and
        velocities, both as means over ranks, by name. They are zero here from now on.
        """
        residuals: dict[str, Tensor] = {}
        velocities: dict[str, Tensor] = {}
        for group in self.groups:
            acc = group.memory.acc
            velocity, residual = acc.drop_velocity(), acc.values.clone()
            assert velocity is not None
            self.transport.perform(AllReduce(velocity))
            self.transport.perform(AllReduce(residual))
            for member in group.members:
                if member.name in names:
                    velocities[member.name] = self._mean(group, member, velocity)
                    residuals[member.name] = self._mean(group, member, residual)
                    acc.write(group.offsets[member.name], torch.zeros(member.elements, device=self._device))
        self._momentum = False
        return residuals, velocities

    def _mean(self, group: Group, member: Member, total: Tensor) -> Tensor:
        mean = torch.empty(member.elements, device=self._device)
        group.memory.acc.read_from(total, group.offsets[member.name], mean)
        return mean / self.transport.workers

    # --- state ----------------------------------------------------------------------------------------------------

    def stats(self) -> SyncStats:
        """What the present groups have done so far."""
        return SyncStats([group.stats for group in self.groups])

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, velocities and controllers, by parameter name. Plain tensors and numbers only."""
        saved = {member.name: self._save(group, member) for group in self.groups for member in group.members}
        saved.update(self._loose)
        return {
            "version": 1,
            "steps": self.steps,
            "residuals": {name: each.residual for name, each in saved.items()},
            "velocities": {name: each.velocity for name, each in saved.items() if each.velocity is not None},
            "groups": [[member.name for member in group.members] for group in self.groups],
            "densities": [group.density for group in self.groups],
            "methods": [group.method.state_dict() for group in self.groups],
        }

    def load_state_dict(self, state: dict[str, Any], *, regroup: bool = False) -> None:
        """Continue where `state_dict` was taken. Checked whole before anything is changed.

        Groups stay as they are, unless `regroup` says to take those of the state. The controllers of groups that were
        others in the state start anew.
        """
        sizes = self._check_state(state)
        if regroup:
            groups = [[Member(name, sizes[name]) for name in names] for names in state["groups"]]
            self.regroup(groups, state.get("densities"))
        self.steps = state["steps"]
        for name, residual in state["residuals"].items():
            velocity = state["velocities"].get(name)
            speed = None if velocity is None else _flat(velocity, self._device)
            self._loose[name] = _Saved(_flat(residual, self._device), speed)
        for group in self.groups:
            for member in group.members:
                self._restore(group, member.name, self._loose.pop(member.name))
            names = [member.name for member in group.members]
            if names in state["groups"]:
                group.method.load_state_dict(state["methods"][state["groups"].index(names)])

    def set_velocity(self, name: str, velocity: Tensor) -> None:
        """Let this parameter's momentum go on from here. Between steps."""
        for group in self.groups:
            if name in group.offsets:
                group.memory.acc.write_velocity(group.offsets[name], velocity)
        if name in self._loose:
            self._loose[name].velocity = velocity

    def _restore(self, group: Group, name: str, saved: _Saved) -> None:
        acc, offset = group.memory.acc, group.offsets[name]
        acc.write(offset, saved.residual)
        if saved.velocity is not None and acc.velocity is not None:
            acc.write_velocity(offset, saved.velocity)

    def _check_state(self, state: dict[str, Any]) -> dict[str, int]:
        """Whether this state fits the model. Returns each parameter's elements."""
        if not isinstance(state, dict) or state.get("version") != 1:
            version = state.get("version") if isinstance(state, dict) else None
            raise ConfigError(f"this state has version {version!r}; spardl here reads version 1.")
        sizes = {member.name: member.elements for group in self.groups for member in group.members}
        sizes |= {name: saved.residual.numel() for name, saved in self._loose.items()}
        for kind in ("residuals", "velocities"):
            for name, tensor in state[kind].items():
                if sizes.get(name) != tensor.numel():
                    raise ConfigError(
                        f"the {kind} of {name!r} in this state have {tensor.numel()} elements, but the model has"
                        f" {sizes.get(name, 'no such parameter')}; load the state of the same model."
                    )
        missing = sorted(set(sizes) - set(state["residuals"]))
        if missing:
            raise ConfigError(f"this state has no residual for {missing[0]!r}; load the state of the same model.")
        if state["velocities"] and not self._momentum:
            raise ConfigError(
                "this state carries momentum, and there is none here to go on with it; attach with optimizer=... first."
            )
        return sizes


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


def _as_float(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype is torch.float32 else gradient.float()


def _flat(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device=device, dtype=torch.float32).reshape(-1).contiguous()
