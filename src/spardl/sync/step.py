"""One group's step, as a program without I/O: accumulate, diagnose, exchange, settle, average.

This is the only place that knows the protocol of a step. The session drives it over a transport, the simulator drives
one per rank, and tests do either. A step leaves its group open: whoever drives it commits it or rolls it back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from spardl.collectives.program import AllReduce, Program, known
from spardl.host import bring, upload
from spardl.memory.layout import entries
from spardl.memory.velocity import Momentum
from spardl.sparse import Array, Ints, SparseBlocks
from spardl.sync.diagnosis import delta
from spardl.sync.group import Group
from spardl.sync.landing import Changes, changes, landings
from spardl.transport.ring import ring_amount


@dataclass(frozen=True, slots=True)
class Part:
    """One member's gradient in one step: a flat tensor in memory order, which receives the averaged result.

    base    what of it has been synchronised before, and is neither sent nor averaged again; it is part of the result
    shared  the tensor is this rank's own weights, which stay as they are, and what is exchanged is how far these shared
            ones are from them; the result is a landing
    unused  this rank's backward did not reach it. What no rank has reached waits, lest it be sent where nobody reads it
    """

    name: str
    gradient: Tensor
    momentum: Momentum | None = None
    base: Tensor | None = None
    shared: Tensor | None = None
    unused: bool = False


@dataclass(frozen=True, slots=True)
class Terms:
    """What all groups of one step have in common.

    step      its number, from 0, which decides densities
    density   instead of the plans' own
    scale     the loss scale that gradients carry; residuals are kept without it
    clip      the factor that brings this rank's own gradient down to the allowed norm
    diagnose  measure how much better than chance selections are
    skips     backward may leave parameters out, so ranks agree on which
    lazily    let the exchange add gradients up, in part while messages travel
    """

    step: int = 0
    density: float | None = None
    scale: float = 1.0
    clip: float = 1.0
    diagnose: bool = False
    skips: bool = False
    lazily: bool = False


@dataclass(slots=True)
class Outcome:
    """A group's step between its exchange and its commit.

    parts     as the ranks have agreed on them
    buffers   their gradients as float32, which belong to the step until it is committed or rolled back
    averages  positions and values of the whole group, in natural order; None if the result is dense, in memory
    edges     where each part's averages begin, and where each one's end; known when the step has been read
    poisoned  whether some rank's gradient was not finite; known when the step has been read
    before    the method's state before the exchange, for a rollback
    offered   of weights: the differences of a dense exchange, in natural order
    changes   of weights: what a sparse exchange has taken out of the differences
    """

    parts: Sequence[Part]
    buffers: list[Tensor]
    factor: float
    averages: tuple[Array, Array] | None = None
    edges: Ints | None = None
    poisoned: bool = False
    before: dict[str, Any] | None = None
    offered: Tensor | None = None
    changes: Changes | None = None

    def shares(self, group: Group) -> Iterator[tuple[Part, Array, Array]]:
        """Each part with its positions, from its own first element, and averages, in its gradient's type."""
        assert self.averages is not None and self.edges is not None, "a step is read before it is committed"
        count = len(self.parts)
        edges = zip(self.edges[:count].tolist(), self.edges[count:].tolist(), strict=True)
        for part, (i, j) in zip(self.parts, edges, strict=True):
            positions, values = (each[i:j] for each in self.averages)
            first = group.offsets[part.name]
            if part.gradient.dtype is not torch.float32:
                values = torch.as_tensor(values).to(part.gradient.dtype)
            yield part, positions - first if first else positions, values


def group_step(group: Group, parts: Sequence[Part], terms: Terms) -> Program[Outcome]:
    """Accumulate and exchange one group. Poisoned, if any rank's gradient was not finite: then all ranks' outcomes are.
    On a device that is known when the step has been read (`memory.health.read`).

    Costs the method's rounds; one small all-reduce more if `terms.skips`, a dense one if `terms.diagnose`.
    """
    if terms.skips:
        parts = yield from agree_on_unused(group, parts)
    accumulate(group, parts, terms)
    return (yield from exchange(group, terms))


def agree_on_unused(group: Group, parts: Sequence[Part]) -> Program[list[Part]]:
    """A parameter that any rank has used is used: only what none has used waits."""
    used = upload(np.array([not part.unused for part in parts], np.float32), group.buffer.device)
    yield AllReduce(used, name="agreement on unused parameters")
    found = yield from known(used)
    return [replace(part, unused=not use) for part, use in zip(parts, found.tolist(), strict=True)]


def accumulate(group: Group, parts: Sequence[Part], terms: Terms) -> None:
    """Add one group's gradients, whose memory is ours until the step is over. Another group may travel meanwhile."""
    started = time.perf_counter()
    with record_function("spardl::accumulate"):
        buffers = bring([as_float(part) for part in parts], group.buffer.device)
        group.outcome = Outcome(parts, buffers, terms.scale / group.workers)
        for part, buffer in zip(parts, buffers, strict=True):
            offset = group.offsets[part.name]
            if part.shared is not None:
                group.transaction.differ(offset, part.shared, part.gradient)
            elif part.unused:
                group.transaction.hold(part.name, offset, buffer)
            else:
                momentum = _beside(part.momentum, group)
                group.transaction.lend(part.name, offset, buffer, terms.clip / terms.scale, momentum)
        if not terms.lazily:
            group.transaction.add_up()
    group.stats.seconds_selecting += time.perf_counter() - started


def _beside(momentum: Momentum | None, group: Group) -> Momentum | None:
    """The rule, with weights where the group's memory is."""
    if momentum is None or momentum.weights.device.type == group.buffer.device.type:
        return momentum
    return replace(momentum, weights=bring([momentum.weights], group.buffer.device)[0])


def exchange(group: Group, terms: Terms) -> Program[Outcome]:
    """Exchange what was accumulated, and leave the averages in the outcome."""
    outcome = group.outcome
    assert outcome is not None, "a group is accumulated before it is exchanged"
    outcome.before = group.method.state_dict()
    density = group.plan.density.at(terms.step) if terms.density is None else terms.density
    method = group.method if density < 1.0 else group.dense
    if not method.about.by_blocks:
        group.transaction.add_up()
    total = None
    if terms.diagnose and not method.about.dense:
        total = yield from _sum_of_all(group)
    if group.of_weights and method.about.dense:
        outcome.offered = _in_natural_order(group)
    result = yield from method.synchronize(group.memory, density)
    with record_function("spardl::average"):
        health = group.transaction.health
        if result is None:
            _note_densely(group, outcome)
            # As of a ring, so that 32 bits per entry come out beside the sparse methods' figures.
            group.stats.entries_sent += int(ring_amount(group.plan.elements, group.workers))
        elif not health.known_poisoned:
            group.policy.settle(group.buffer, result)
            if total is not None:
                group.stats.delta = _diagnosis(group, total, result, density)
            outcome.averages = group.buffer.natural(result, outcome.factor)
            _note_averages(group, outcome, *outcome.averages)
            if group.of_weights:
                outcome.changes = changes(group, outcome)
        outcome.poisoned = health.known_poisoned
    return outcome


def _sum_of_all(group: Group) -> Program[Tensor]:
    """What all ranks have accumulated, in natural order."""
    total = _in_natural_order(group)
    poisoned = group.transaction.health.poisoned
    if isinstance(poisoned, Tensor):
        total.masked_fill_(poisoned, torch.nan)
    elif poisoned:
        total.fill_(torch.nan)
    yield AllReduce(total, name="diagnosis")
    return total


def _in_natural_order(group: Group) -> Tensor:
    """A copy of what this rank has accumulated."""
    values = torch.empty(group.plan.elements, device=group.buffer.device)
    group.buffer.read(0, values)
    return values


def _diagnosis(group: Group, total: Tensor, result: SparseBlocks, density: float) -> float:
    positions, values = (torch.as_tensor(each) for each in group.buffer.natural(result))
    return delta(total, positions, values, entries(density, total.numel()))


def _note_averages(group: Group, outcome: Outcome, positions: Array, values: Array) -> None:
    """Ask where each part's averages lie, and whether all are finite, also in gradients that have fewer bits."""
    health, parts = group.transaction.health, outcome.parts
    if len(parts) == len(group.plan.members) == 1 and parts[0].gradient.dtype is torch.float32:
        outcome.edges = np.array([0, len(values)])
        health.note(group.buffer.kernels.all_finite(values))
        return
    places, amounts = torch.as_tensor(positions), torch.as_tensor(values)
    firsts = [group.offsets[part.name] for part in parts]
    stops = [first + part.gradient.numel() for first, part in zip(firsts, parts, strict=True)]

    def learn(edges: Ints) -> None:
        outcome.edges = edges

    health.ask(torch.searchsorted(places, upload([*firsts, *stops], places.device)), learn)
    kinds = [part.gradient.dtype for part in parts]
    if all(kind is torch.float32 for kind in kinds):
        health.note(group.buffer.kernels.all_finite(values))
        return
    owner = torch.searchsorted(upload(firsts, places.device), places, right=True) - 1
    for kind in dict.fromkeys(kinds):
        others = upload(np.array([other is not kind for other in kinds]), places.device)
        health.note((amounts.to(kind).isfinite() | others[owner]).all())


def _note_densely(group: Group, outcome: Outcome) -> None:
    """Whether the dense sums are finite, and stay so as averages in gradients that have fewer bits than ours."""
    health = group.transaction.health
    health.note(group.buffer.kernels.all_finite(group.memory.everything()))
    for part in outcome.parts:
        if part.gradient.dtype is not torch.float32:
            total = torch.empty(part.gradient.numel(), device=group.buffer.device)
            group.buffer.read(group.offsets[part.name], total)
            health.note(torch.isfinite((total * outcome.factor).to(part.gradient.dtype)).all())


def as_float(part: Part) -> Tensor:
    """A part's own gradient in float32, without what has been synchronised before."""
    gradient = part.gradient if part.gradient.dtype is torch.float32 else part.gradient.float()
    return gradient if part.base is None else gradient.sub_(part.base.to(gradient.dtype))


def commit(group: Group) -> None:
    """End a step that counts: write the averages into the gradients, or of weights, say what they are to receive."""
    outcome = group.outcome
    assert outcome is not None and not outcome.poisoned
    group.transaction.commit(dense=outcome.averages is None)
    if group.of_weights:
        group.landings = landings(group, outcome)
    elif outcome.averages is None:
        _deliver_densely(outcome)
    else:
        _deliver_sparsely(group, outcome)
    averages = outcome.averages
    group.stats.steps += 1
    group.stats.last_entries = group.plan.elements if averages is None else len(averages[0])
    group.stats.entries += group.stats.last_entries
    group.policy.forget()
    for part in outcome.parts:
        if part.base is not None:
            part.gradient.add_(part.base)
    group.outcome = None


def _deliver_densely(outcome: Outcome) -> None:
    for part, buffer in zip(outcome.parts, outcome.buffers, strict=True):
        torch.mul(buffer, outcome.factor, out=buffer)
        if buffer is not part.gradient:
            part.gradient.copy_(buffer, non_blocking=True)


def _deliver_sparsely(group: Group, outcome: Outcome) -> None:
    for part, positions, values in outcome.shares(group):
        if part.gradient.dtype is torch.float32 and part.gradient.device.type == group.buffer.device.type:
            group.buffer.kernels.put_only(part.gradient, positions, values)
            continue
        places, averages = bring([torch.as_tensor(positions), torch.as_tensor(values)], part.gradient.device)
        part.gradient.zero_()
        part.gradient[places] = averages


def roll_back(group: Group) -> None:
    """End a step that does not count: residuals, velocities and controllers are as they were, bit for bit."""
    if group.outcome is None:
        return
    group.policy.forget()
    group.transaction.rollback()
    if group.outcome.before is not None:
        group.method.load_state_dict(group.outcome.before)
    group.outcome = None


def refuse(group: Group, *, value: float) -> None:
    """Roll back, and hand out `value` everywhere instead of a gradient; what had been synchronised before stays."""
    parts = group.outcome.parts if group.outcome is not None else ()
    roll_back(group)
    group.stats.skipped += 1
    for part in parts:
        if part.shared is not None:
            continue
        part.gradient.fill_(value)
        if part.base is not None:
            part.gradient.add_(part.base)
