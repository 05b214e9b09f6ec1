"""Synchronizer: gradients in, averaged sparse gradients out.

State is keyed by parameter name. A *group* is a run of tensors that is synchronised together, with one accumulator and
one method. A step runs its groups one after the other, and then commits all of them or rolls all of them back.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spardl import kernels
from spardl.accumulator import Accumulator, Momentum
from spardl.collectives.memory import Memory
from spardl.collectives.method import Method, method_class
from spardl.collectives.program import AllReduce
from spardl.config import SyncConfig
from spardl.errors import ConfigError, ConfigMismatch
from spardl.metrics import GroupStats, SyncStats
from spardl.sparse import SparseBlocks
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

    `unused` says that this rank's backward did not reach it: its residual waits, lest it be sent where DDP drops it.
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
    """A group's step between its exchange and its commit."""

    parts: Sequence[Part]
    buffers: list[Tensor]
    result: SparseBlocks | None


@dataclass
class Group:
    """Members in order, their accumulator and the method that synchronises it."""

    members: Sequence[Member]
    method: Method
    dense_method: Method
    memory: Memory
    stats: GroupStats
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
    ) -> None:
        self.config = config
        self.transport = transport
        self.groups: list[Group] = []
        self.steps = 0
        self.poisoned = False
        self._momentum = momentum
        self._device = torch.device(device)
        self._kernels = kernels.for_device(self._device)
        self._loose: dict[str, _Saved] = {}
        self._scale = 1.0

    # --- groups ---------------------------------------------------------------------------------------------------

    def regroup(self, groups: Iterable[Sequence[Member]]) -> None:
        """Arrange members in these groups from the next step on; residuals and velocities move along, bit for bit."""
        for group in list(self.groups):
            self._dissolve(group)
        self.groups = [self._form(members) for members in groups]

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
        length = sum(member.elements for member in members)
        rank, workers = self.transport.rank, self.transport.workers
        dense = workers == 1 or length < self.config.dense_below
        name = "dense" if dense else self.config.method
        method = method_class(name)(rank, workers, length, self.config)
        dense_method = method_class("dense")(rank, workers, length, self.config)
        acc = Accumulator(method.layout, residuals=self.config.residuals, momentum=self._momentum, device=self._device)
        title = members[0].name if len(members) == 1 else f"{members[0].name} .. {members[-1].name}"
        stats = GroupStats(title, length, dense=name == "dense")
        group = Group(members, method, dense_method, Memory(acc, Codec(self.config.values, self.config.indices)), stats)
        offset = 0
        for member in members:
            group.offsets[member.name] = offset
            saved = self._loose.pop(member.name, None)
            if saved is not None:
                acc.write(offset, saved.residual)
                if saved.velocity is not None and acc.velocity is not None:
                    acc.write_velocity(offset, saved.velocity)
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
        self._scale = scale
        self.poisoned = False

    def synchronize(self, group: Group, parts: Sequence[Part]) -> None:
        """Exchange one group. Its gradients' memory is ours until `finish`."""
        started, before = time.perf_counter(), self.transport.traffic.copy()
        sent = group.memory.entries_sent
        try:
            self._exchange(group, parts)
        except BaseException:
            self.abandon()
            raise
        group.stats.entries_sent += group.memory.entries_sent - sent
        group.stats.observe(before, self.transport.traffic, time.perf_counter() - started)

    def _exchange(self, group: Group, parts: Sequence[Part]) -> None:
        acc = group.memory.acc
        density = self.config.density_at(self.steps)
        dense = group.stats.dense or density >= 1.0
        buffers = [_as_float(part.gradient) for part in parts]
        group.outcome = _Outcome(parts, buffers, None)
        clip = self._clip(buffers)
        acc.poisoned = not all(self._kernels.all_finite(buffer) for buffer in buffers)
        if dense or not acc.poisoned:
            for part, buffer in zip(parts, buffers, strict=True):
                if part.unused:
                    acc.hold(group.offsets[part.name], buffer)
                else:
                    acc.add(group.offsets[part.name], buffer, clip / self._scale, part.momentum)
        method = group.dense_method if dense else group.method
        if dense and acc.poisoned:
            acc.values.fill_(torch.nan)
        group.outcome.result = run(method.synchronize(group.memory, density), self.transport)
        if dense:
            acc.poisoned = not self._kernels.all_finite(acc.values)
        elif not acc.poisoned:
            assert group.outcome.result is not None
            acc.settle(group.outcome.result)
        self.poisoned |= acc.poisoned

    def finish(self) -> bool:
        """End the step: write the averages into the gradients, or, if any rank's gradient was not finite, NaN.

        Returns whether the step counts. If not, residuals and velocities are as they were before it.
        """
        self.steps += 1
        fine = not self.poisoned
        for group in self.groups:
            if group.outcome is None:
                continue
            started = time.perf_counter()
            if fine:
                self._deliver(group, group.outcome)
            else:
                self._refuse(group, group.outcome)
            group.outcome = None
            group.stats.seconds_selecting += time.perf_counter() - started
        return fine

    def abandon(self) -> None:
        """Roll back whatever has begun, so that residuals are intact after a failure."""
        for group in self.groups:
            if group.outcome is not None:
                group.memory.acc.rollback()
                group.outcome = None

    def _deliver(self, group: Group, outcome: _Outcome) -> None:
        acc, factor = group.memory.acc, self._scale / self.transport.workers
        group.stats.steps += 1
        acc.commit(dense=outcome.result is None)
        if outcome.result is None:
            group.stats.entries += group.stats.elements
            for part, buffer in zip(outcome.parts, outcome.buffers, strict=True):
                torch.mul(buffer, factor, out=buffer)
                if buffer is not part.gradient:
                    part.gradient.copy_(buffer)
            return
        positions, values = acc.natural(outcome.result)
        group.stats.entries += len(outcome.result)
        values = values * factor
        offsets = [group.offsets[part.name] for part in outcome.parts]
        ends = [offset + part.gradient.numel() for offset, part in zip(offsets, outcome.parts, strict=True)]
        edges = torch.searchsorted(positions, torch.tensor([*offsets, *ends], device=positions.device)).tolist()
        for i, part in enumerate(outcome.parts):
            first, last = edges[i], edges[i + len(offsets)]
            part.gradient.zero_()
            part.gradient[positions[first:last] - offsets[i]] = values[first:last].to(part.gradient.dtype)

    def _refuse(self, group: Group, outcome: _Outcome) -> None:
        group.stats.skipped += 1
        group.memory.acc.rollback()
        for part in outcome.parts:
            part.gradient.fill_(torch.nan)

    def _clip(self, buffers: Sequence[Tensor]) -> float:
        """The factor that brings this group's own gradient down to the allowed norm."""
        if self.config.local_clip is None:
            return 1.0
        norms = torch.stack([torch.linalg.vector_norm(buffer) for buffer in buffers])
        norm = float(torch.linalg.vector_norm(norms)) / self._scale
        allowed = self.config.local_clip / self.transport.workers**0.5
        return min(1.0, allowed / norm) if norm > 0 else 1.0

    def go_dense(self) -> dict[str, Tensor]:
        """Send everything from now on, starting with what residuals hold. Collective.

        Momentum stops here: returns the mean velocity over ranks by parameter name, for whoever takes it over.
        """
        self.config = replace(self.config, density=1.0)
        velocities = {}
        for group in self.groups:
            velocity = group.memory.acc.drop_velocity()
            if velocity is None:
                continue
            self.transport.perform(AllReduce(velocity))
            velocity /= self.transport.workers
            for member in group.members:
                mean = torch.empty(member.elements, device=self._device)
                group.memory.acc.read_from(velocity, group.offsets[member.name], mean)
                velocities[member.name] = mean
        self._momentum = False
        return velocities

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
            "methods": {group.stats.name: group.method.state_dict() for group in self.groups},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Checked whole before anything is changed."""
        if state.get("version") != 1:
            raise ConfigError(f"this state has version {state.get('version')!r}; spardl here reads version 1.")
        members = {member.name: (group, member) for group in self.groups for member in group.members}
        for kind in ("residuals", "velocities"):
            for name, tensor in state[kind].items():
                expected = members[name][1].elements if name in members else self._loose_elements(name)
                if expected != tensor.numel():
                    raise ConfigError(
                        f"the {kind} of {name!r} in this state have {tensor.numel()} elements, but the model has"
                        f" {expected or 'no such parameter'}; load the state of the same model."
                    )
        missing = sorted(set(members) - set(state["residuals"]))
        if missing:
            raise ConfigError(f"this state has no residual for {missing[0]!r}; load the state of the same model.")
        self.steps = state["steps"]
        for name, residual in state["residuals"].items():
            velocity = state["velocities"].get(name)
            if name in members:
                group = members[name][0]
                group.memory.acc.write(group.offsets[name], _flat(residual, self._device))
                if velocity is not None and group.memory.acc.velocity is not None:
                    group.memory.acc.write_velocity(group.offsets[name], _flat(velocity, self._device))
            else:
                speed = None if velocity is None else _flat(velocity, self._device)
                self._loose[name] = _Saved(_flat(residual, self._device), speed)
        for group in self.groups:
            if group.stats.name in state["methods"]:
                group.method.load_state_dict(state["methods"][group.stats.name])

    def _loose_elements(self, name: str) -> int:
        return self._loose[name].residual.numel() if name in self._loose else 0


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


def check_agreement(texts: Sequence[str], what: str) -> None:
    """Raise `ConfigMismatch` naming two ranks that said different things, and which. Texts are JSON objects."""
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        first, other = json.loads(texts[0]), json.loads(text)
        for key in sorted(set(first) | set(other)):
            if first.get(key) != other.get(key):
                ours, theirs = _difference(first.get(key), other.get(key))
                raise ConfigMismatch(
                    f"ranks 0 and {rank} differ in {what}: {key} is {ours} on rank 0 and {theirs} on rank {rank};"
                    " start all ranks with the same settings and the same model.",
                    ranks=(0, rank),
                )


def _difference(first: object, other: object) -> tuple[str, str]:
    """The parts worth showing: of two lists, only the first place where they part."""
    if isinstance(first, list) and isinstance(other, list):
        if len(first) != len(other):
            return f"{len(first)} items", f"{len(other)} items"
        return next((repr(a), repr(b)) for a, b in zip(first, other, strict=True) if a != b)
    return repr(first), repr(other)


def _as_float(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype is torch.float32 else gradient.float()


def _flat(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device=device, dtype=torch.float32).reshape(-1).contiguous()
