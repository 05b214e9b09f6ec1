"""Session: the one verb for whoever has named tensors to synchronise.

A front end submits the tensors of a step by name, in any order, and closes the step; groups whose tensors are all there
start at once, in the same order on all ranks, and travel on a thread of their own while the caller computes. Or it
reduces one tensor and waits. The session owns transport, kernels, threads, statistics and state, and gives them back
when it ends.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from spardl import kernels
from spardl.agreement import check_agreement
from spardl.config import SyncConfig
from spardl.errors import StateError
from spardl.kernels.cpu.crew import Crew
from spardl.machine import cores_per_rank
from spardl.memory.algebra import norm_of
from spardl.memory.velocity import Momentum
from spardl.metrics import Change, Span, StepEvent, SyncStats
from spardl.sync import replicas
from spardl.sync import state as states
from spardl.sync.fellows import Fellows
from spardl.sync.group import Group
from spardl.sync.lanes import Lanes
from spardl.sync.plan import GroupPlan, Member, plan_model
from spardl.sync.step import Part, Terms
from spardl.sync.synchronizer import Synchronizer
from spardl.sync.worker import Worker
from spardl.transport.base import Transport, run
from spardl.transport.choice import own_transport, transport_named
from spardl.transport.members import Group as ProcessGroup

logger = logging.getLogger(__name__)

Commit = Literal["step", "group"]
Observer = Callable[[StepEvent], None]

REMEMBERED = 256  # events


@dataclass(slots=True)
class _Step:
    """The step that is open."""

    terms: Terms
    instead: float
    bytes_before: int
    opened: float = field(default_factory=time.perf_counter)
    parts: dict[str, Part] = field(default_factory=dict)
    started: int = 0  # groups


class Session:
    """One model's, or one set of tensors', synchronisation on this rank.

    Between `submit` and the end of `close` a tensor's memory belongs to the session. After a failure nothing else runs:
    every call raises it again, and residuals are as they were before the step that failed. `sync` has the groups and
    what they hold, to be looked at between steps; `worker` drives them.

    Args:
        transport: between the ranks that take part; it belongs to the session.
        config: the settings.
        plans: the groups to begin with.
        momentum: whether tensors bring a rule of momentum that acts before the selection.
        of_weights: whether tensors are weights (`submit(..., shared=...)`) and not gradients.
        overlap: whether groups start while backward still works, so that threads for them come first.
        commit: who commits. "step": all groups of a step or none, when it is closed. "group": each group alone, as soon
            as it has been exchanged, for callers that need its result at once; each then counts steps of its own.
        crew: the threads that add gradients up.
        device: where the tensors are, if not where the transport's frames are. Then memory is on the host, and nothing
            overlaps: what is copied from there is in order with what the caller has queued.
        fellows: the ranks that hold the other parts of the model, if it lies in parts; they belong to the session.
        lasts: whether those that are left may go on when ranks are lost (`community.py`), over a transport that can be
            formed anew. Each step then takes ceil(log2 P) short rounds more.
    """

    def __init__(
        self,
        transport: Transport,
        config: SyncConfig,
        plans: Sequence[GroupPlan],
        *,
        momentum: bool = False,
        of_weights: bool = False,
        overlap: bool = False,
        commit: Literal["step", "group"] = "step",
        crew: Crew | None = None,
        device: torch.device | None = None,
        fellows: Fellows | None = None,
        lasts: bool = False,
    ) -> None:
        self.transport = transport
        transport.checks = config.paranoid > 0
        self.changes: list[Change] = []
        self.departed: dict[int, int] = {}  # who was left behind, by number, and how many steps counted then
        self.seconds_exposed = 0.0  # that training has waited for exchanges, as front ends count them
        self.fellows = fellows
        self.config = config
        self.commit = commit
        self.events: deque[StepEvent] = deque(maxlen=REMEMBERED)
        self.observers: list[Observer] = []
        memory = torch.device(transport.device)
        self.sync = Synchronizer(
            transport.rank,
            transport.workers,
            kernels=kernels.for_device(memory),
            device=memory,
            momentum=momentum,
            of_weights=of_weights,
            crew=crew,
        )
        on_host = (memory if device is None else device).type == "cpu"
        lanes = Lanes(threads=on_host and commit == "step", ahead=overlap and on_host)
        self.worker = Worker(self.sync, transport, lanes, fellows, votes=lasts)
        self._step: _Step | None = None
        self.compared = False  # whether ranks know that they are at the same step
        self.regroup(plans)

    @classmethod
    def open(
        cls,
        members: Sequence[Member],
        config: SyncConfig,
        *,
        process_group: ProcessGroup = None,
        device: torch.device | str = "cpu",
        facts: Mapping[str, Any] | None = None,
        momentum: bool = False,
        of_weights: bool = False,
        overlap: bool = False,
        commit: Literal["step", "group"] = "step",
        subject: str = "configuration or model",
        parts: ProcessGroup = None,
        lasts: bool = False,
    ) -> "Session":
        """Connect the ranks of a group, make sure that they agree, and arrange the members. Collective.

        Args:
            members: the tensors, in the order in which they will be ready.
            config: the settings.
            process_group: the ranks that take part; default: all.
            device: where the tensors are.
            facts: what all ranks must have in common beside the settings; default: the members.
            momentum, of_weights, overlap, commit, lasts: as for the constructor.
            subject: what the ranks are said to differ in.
            parts: the ranks that hold the other parts of what the members are a part of; default: nobody.

        Raises:
            ConfigError: settings that cannot work with these ranks.
            ConfigMismatch: two ranks differ; both and what they differ in are named.
            PeerError: a rank did not come.
        """
        device = torch.device(device)
        memory = torch.device("cpu") if config.residuals_on == "cpu" else device
        make = own_transport if lasts else transport_named
        how_to_connect: dict[str, Any] = {"timeout": config.timeout, "device": memory, "encrypt": config.encrypt}
        transport: Transport = make(config.transport, process_group, **how_to_connect)
        config.check_for(transport.workers)
        given = facts or {"members": [[each.name, each.elements] for each in members]}
        check_agreement({**shared_settings(config), **given}, transport.gather_texts, subject)
        # One group begins when backward is over and its cores are free; several must leave them to it.
        alone = memory.type == "cpu" and not overlap
        crew = Crew.for_cores(cores_per_rank(transport.gather_texts)) if alone else None
        plans = plan_model(config, members, transport.workers) if members else []
        how: dict[str, Any] = {"momentum": momentum, "of_weights": of_weights, "overlap": overlap, "commit": commit}
        how["lasts"] = lasts
        fellows = None if parts is None else Fellows(parts, timeout=config.timeout, device=memory)
        return cls(transport, config, plans, crew=crew, device=device, fellows=fellows, **how)

    # --- groups ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> list[GroupPlan]:
        """How groups are synchronised now, in their order."""
        return self.sync.plan

    def regroup(self, plans: Sequence[GroupPlan]) -> None:
        """Arrange members like this from the next step on; residuals and velocities move along, bit for bit."""
        self.sync.regroup(plans)
        logger.info("%s", describe(self))

    def include(self, plan: GroupPlan) -> None:
        """Add a group, before any of its members is submitted."""
        self.sync.include(plan)

    def exclude(self, name: str) -> None:
        """Drop the group of this tensor, with its residual."""
        self.wait()
        group = self.sync.group_with(name)
        if group is not None:
            self.sync.exclude(group)

    # --- one step -------------------------------------------------------------------------------------------------

    def begin(
        self, *, scale: float = 1.0, skips: bool = False, instead: float = torch.nan, density: float | None = None
    ) -> None:
        """Open a step; `submit` does it by itself where the defaults will do.

        Args:
            density: of this step, instead of what plans say; the same on all ranks.
            scale: the loss scale that gradients carry; residuals are kept without it.
            skips: some ranks may not have used some tensors.
            instead: what all ranks get instead of results if any rank's gradient is not finite.
        """
        self.check()
        assert self._step is None, "a step ends with close()"
        every, number = self.config.diagnose_every, self.sync.steps
        diagnose = every > 0 and number % every == 0
        how: dict[str, Any] = {"diagnose": diagnose, "skips": skips, "lazily": self.worker.is_lazy}
        terms = Terms(number, density=density, scale=scale, **how)
        self._step = _Step(terms, instead, self.transport.traffic.bytes_sent)
        if not self.compared:
            self.compared = True
            where = {"steps so far": number, "groups": [plan.names for plan in self.plan]}
            where["densities"] = [plan.density.settled for plan in self.plan]
            self.worker.run(lambda: check_agreement(where, self.transport.gather_texts, "where they are"))

    def submit(
        self,
        name: str,
        gradient: Tensor,
        *,
        momentum: Momentum | None = None,
        base: Tensor | None = None,
        shared: Tensor | None = None,
        unused: bool = False,
    ) -> None:
        """Hand over one tensor of this step: flat, in memory order. It receives the average over all ranks.

        Of weights, nothing is changed; `landing.take_landings` has what they receive once the step is closed. They may
        be written to as soon as `close` has returned.

        Args:
            name: as among the members.
            gradient: its memory belongs to the session until the step is closed.
            momentum: the rule that acts on it before the selection.
            base: what of it was synchronised before; it is added to the result and not sent again.
            shared: of weights, those that all ranks have in common; the tensor itself is this rank's own.
            unused: this rank has no gradient for it, only zeros.
        """
        if self._step is None:
            self.begin()
        assert self._step is not None
        self._step.parts[name] = Part(name, gradient, momentum, base, shared, unused)
        if self.config.clip_norm is None:  # else the norm of the whole model has to be known first
            start_groups(self, self._step)

    def average(self, tensor: Tensor) -> "Future[Tensor]":
        """Average one more tensor in this step, densely and without a residual; sparse COO tensors as well."""
        assert self._step is not None, "begin() opens a step"
        return self.worker.average(tensor)

    def close(
        self,
        after: Callable[[bool], None] | None = None,
        *,
        first: Callable[[], None] | None = None,
        deferred: bool = False,
    ) -> "Future[bool]":
        """End the step once all its groups have been exchanged: commit all of them or roll all back.

        Args:
            after: called on the communication thread with whether the step counts.
            first: called there before that, for whatever may fail: a peer that is lost in it has the step rolled back.
            deferred: on a device, let the host go on, and wait for the device when the result is asked for.

        Returns:
            Whether it counts: false if some rank's gradient was not finite. An error if the step failed.
        """
        step, self._step = self._step, None
        assert step is not None, "begin() opens a step"
        if self.config.clip_norm is not None:
            allowed = self.config.clip_norm * self.transport.workers**0.5
            step.terms = replace(step.terms, clip=clip_factor(step.parts.values(), allowed, step.terms.scale))
            start_groups(self, step)
        return self.worker.run(lambda: self._finish(step, first, after), deferred=deferred)

    def reduce(self, name: str, tensor: Tensor, *, step: int | None = None) -> bool:
        """Average one flat tensor over all ranks, in place, and wait. Returns whether all ranks' values were finite.

        With commit="group" its group, which has no other member, is committed alone, and no observer is told: whoever
        knows what makes a step of several such groups does that (`tell`). `step` is then the number of the step, by
        which densities go; default: how often this group was reduced so far.
        """
        if self.commit == "step":
            self.submit(name, tensor)
            return self.close().result()
        group = self.sync.group_with(name)
        assert group is not None and len(group.offsets) == 1, f"{name!r} is not a group of its own"
        return self.worker.run(lambda: self.worker.reduce(group, tensor, step)).result()

    def _finish(self, step: _Step, first: Callable[[], None] | None, after: Callable[[bool], None] | None) -> bool:
        groups = self.sync.groups
        missing = [name for group in groups for name in group.offsets if name not in step.parts]
        if missing:
            raise StateError(
                f"{missing[0]!r} was not submitted in this step, and every member is part of every step. DDP does not"
                " synchronise what was frozen when the model was wrapped: unfreeze parameters before wrapping the"
                " model, or freeze them before attach."
            )
        self.worker.complete()
        if first is not None:
            first()
        return self.worker.together(lambda: conclude(self, step, after))

    def wait(self) -> None:
        """Return when nothing is under way."""
        self.worker.wait()

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        self.worker.check()

    # --- state and end --------------------------------------------------------------------------------------------

    def drain(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Take momentum out, for whoever goes on with it: mean residuals and velocities of these. Collective."""
        self.wait()
        return run(self.sync.drain(names), self.transport)

    def stats(self) -> SyncStats:
        """Per group and in total: entries, bytes, bits per entry, density; seconds by what they were spent on."""
        self.wait()
        stats = self.sync.stats()
        stats.changes, stats.seconds_exposed = list(self.changes), self.seconds_exposed
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Residuals, velocities and controllers of *this rank*: each rank saves its own."""
        self.wait()
        return states.save(self.sync)

    def gathered_state_dict(self) -> dict[str, Any]:
        """All ranks' states as one, the same on every rank, for one file. Collective; moves all residuals."""
        self.wait()
        return run(states.gathered(self.sync), self.transport)

    def load_state_dict(self, state: Mapping[str, Any], *, regroup: bool = False) -> None:
        """Continue from a state, exactly; from a gathered one also with another number of workers.

        Args:
            state: what `state_dict` or `gathered_state_dict` gave.
            regroup: take over the groups of the state too.

        Raises:
            StateError: the state is of another rank, world or model, or damaged; nothing was changed.
        """
        self.wait()
        states.load(self.sync, self.config, state, regroup=regroup)
        self.compared = False

    def end(self, *, keep_transport: bool = False) -> None:
        """Give back threads and connections. Residuals can still be saved.

        Args:
            keep_transport: leave the connections to whoever shares them.
        """
        self.worker.stop(StateError("this session has ended; open another one."))
        if self.fellows is not None:
            self.fellows.leave()
        if not keep_transport:
            self.transport.close()


def shared_settings(config: SyncConfig) -> dict[str, Any]:
    """What all ranks must have in common. A key may lie elsewhere on each; that it is the same, they have proved."""
    return {**config.to_dict(), "encrypt": config.encrypt is not None}


def conclude(session: Session, step: _Step, after: Callable[[bool], None] | None) -> bool:
    """Commit a step of which all groups have been exchanged, or roll it back, and tell observers; whether it counts."""
    groups = session.sync.groups
    before = sum(group.stats.entries for group in groups)
    fine = session.worker.finish(step.instead)
    event = StepEvent(
        step=step.terms.step,
        seconds=time.perf_counter() - step.opened,
        counted=fine,
        groups=step.started,
        elements=sum(part.gradient.numel() for part in step.parts.values()),
        entries=sum(group.stats.entries for group in groups) - before,
        bytes_sent=session.transport.traffic.bytes_sent - step.bytes_before,
        spans=spans_of(groups, step.opened) if session.observers else (),
    )
    tell(session, event)
    if after is not None:
        after(fine)
    return fine


def tell(session: Session, event: StepEvent) -> None:
    """Remember a step that is over, and let observers know of it."""
    session.events.append(event)
    for observer in list(session.observers):
        observer(event)


def start_groups(session: Session, step: _Step) -> None:
    """Start every group that is complete and whose turn it is: the order must be the same on all ranks."""
    groups = session.sync.groups
    while step.started < len(groups) and groups[step.started].offsets.keys() <= step.parts.keys():
        group = groups[step.started]
        session.worker.start(group, [step.parts[name] for name in group.offsets], step.terms)
        step.started += 1


def spans_of(groups: Sequence[Group], opened: float) -> tuple[Span, ...]:
    """When each group of a step that was opened then was exchanged, in the order of exchanges."""
    spans = [Span(each.stats.name, each.span[0] - opened, each.span[1] - opened) for each in groups]
    return tuple(sorted((each for each in spans if each.begins >= 0), key=lambda each: each.begins))


def compare_replicas(session: Session, tensors: Mapping[str, Tensor]) -> None:
    """Where `paranoid` asks for it in this step: fail it on all ranks if these tensors differ between them."""
    every, number = session.config.paranoid, session.sync.steps
    if every and number % every == 0:
        session.worker.run(lambda: replicas.compare(tensors, session.transport.gather_texts, number))


def describe(session: Session) -> str:
    """Who moves the bytes, and how groups are synchronised, in one line."""
    transport, plans, config = session.transport, session.plan, session.config
    dense = [plan for plan in plans if plan.is_dense]
    why = "a single worker" if transport.workers == 1 else f"fewer than {config.dense_below} elements"
    elements = sum(plan.elements for plan in plans)
    teams = config.teams_of(transport.workers)
    text = f"rank {transport.rank} of {transport.workers} in {teams} team(s) over {type(transport).__name__}:"
    text += f" {len(plans)} group(s) of {elements} elements in all by {config.method} at density"
    text += f" {config.schedule.final:g}, {config.options}"
    return f"{text}; {len(dense)} of them dense ({why})" if dense and config.method != dense[0].method else text


def clip_factor(parts: Iterable[Part], allowed: float, scale: float) -> float:
    """What brings the norm of all these gradients together down to the allowed one."""
    own = [part.gradient if part.base is None else part.gradient - part.base for part in parts]
    norm = norm_of([gradient.float() for gradient in own]) / scale if own else 0.0
    return min(1.0, allowed / norm) if norm > 0 else 1.0
