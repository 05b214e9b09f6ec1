"""One line on a DistributedDataParallel model.

DDP's buckets merely deliver gradients: state is keyed by parameter name, so a rebuild of the buckets does not matter.
All exchanges run on one communication thread, group after group in the same order on all ranks, while backward goes on.
Where there are several groups, one starts as soon as its last gradient lies in DDP's memory, before its bucket is full,
and a second thread accumulates it while the one before travels.
(This module must not postpone annotations: DDP compares the hook's with the real types.)
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spardl.accumulator import Momentum
from spardl.agreement import check_agreement
from spardl.collectives.dense import Dense
from spardl.collectives.method import method_class
from spardl.collectives.program import AllReduce
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError, SparDLWarning
from spardl.integrations.lanes import Lanes
from spardl.integrations.momentum import LocalMomentum
from spardl.kernels.crew import Crew, crew_of_rank
from spardl.metrics import SyncStats
from spardl.planning.merging import Merging, agree
from spardl.planning.profile import BackwardClock
from spardl.sync import Group, Member, Part, Synchronizer, partition
from spardl.transport.choice import transport_named
from spardl.transport.torchdist import Group as ProcessGroup

# Steps whose backward is not measured, after DDP's buckets are final, and steps that are.
WARM_UP = 2
MEASURED = 5


def attach(
    model: DistributedDataParallel,
    *,
    optimizer: Optimizer | Literal[False] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    process_group: ProcessGroup = None,
    team_size: int | None = None,
    config: SyncConfig | None = None,
    **settings: Any,
) -> "SyncHandle":
    """Synchronise this model's gradients sparsely from now on. Collective: every rank calls it, once, in the same way.

    optimizer      the SGD that will step this model: its momentum and weight decay move into the accumulator, where
                   they belong; False says that there is none to move
    scaler         the GradScaler in use, so that residuals are kept in unscaled units
    process_group  a group or a DeviceMesh (two dimensions: teams x members); default: DDP's own ranks
    team_size      workers per team, instead of `teams`
    settings       fields of `SyncConfig`, instead of or on top of `config`
    """
    state = SparDLState(
        model, process_group, optimizer=optimizer, scaler=scaler, team_size=team_size, config=config, **settings
    )
    model.register_comm_hook(state, spardl_hook)
    return SyncHandle(state)


def spardl_hook(state: "SparDLState", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The hook for `register_comm_hook`: its futures complete when the whole step has been synchronised."""
    return state.submit(bucket)


class SparDLState:
    """The state for `register_comm_hook(state, spardl_hook)`. Arguments as in `attach`; collective."""

    def __init__(
        self,
        model: DistributedDataParallel,
        process_group: ProcessGroup = None,
        *,
        optimizer: Optimizer | Literal[False] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        team_size: int | None = None,
        config: SyncConfig | None = None,
        **settings: Any,
    ) -> None:
        _check_types(model, optimizer, scaler)
        self.config = configure(config, settings)
        self._parameters = _dense_parameters(model)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._expected = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._scaler = scaler
        # DDP makes its final buckets after the first step, with a static graph after the second; groups wait for them.
        self._provisional = 2 if model.static_graph else 1
        self._may_skip = bool(model.find_unused_parameters or model.static_graph)
        device = next(iter(self._names)).device
        where = process_group if process_group is not None else model.process_group
        self._transport = transport_named(self.config.transport, where, timeout=self.config.timeout, device=device)
        self.config = _with_teams(self.config, process_group, team_size, self._transport.workers)
        self.config.resolved_gather(self._transport.workers)  # teams that cannot work are refused here
        self._check_agreement(optimizer or None)
        self._momentum = self._move_momentum(optimizer)
        # Gradients before their buckets: only where backward tells them one by one, in the thread that runs it.
        several = self.config.merge is not None or self.config.groups != "model"
        self._early = several and device.type == "cpu" and not self._may_skip and self.config.groups != "bucket"
        # One group begins when backward is over and its cores are free; several must leave them to it.
        alone = device.type == "cpu" and not several
        crew = crew_of_rank(self._transport.gather_texts) if alone else Crew()
        momentum = self._momentum is not None
        self.sync = Synchronizer(self.config, self._transport, momentum=momentum, device=device, crew=crew)
        self.sync.regroup(self._initial_groups())
        self._inherit_velocities()
        self._lanes = Lanes(threads=device.type == "cpu", ahead=self._early)
        self._begun = 0
        self._open = False
        self._hyper: dict[str, Momentum] = {}
        self._arrived: dict[str, Part] = {}
        self._started = 0  # groups of this step
        self._pending: list[tuple[Future[Tensor], Tensor]] = []
        self._failure: BaseException | None = None
        model.register_forward_pre_hook(self._before_forward)
        self.merging: Merging | None = None
        self._clock = BackwardClock() if self.config.merge is not None else None
        self._awaited = False
        self._views: dict[str, Tensor] = {}  # where DDP keeps each gradient, once its buckets are final
        self._last: str | None = None  # the gradient that is on its way into DDP's memory
        self._hooks: list[RemovableHandle] = []
        if self._clock is not None:
            self._hooks.append(model.register_forward_hook(self._after_forward))
        if self._early or self._clock is not None:
            self._hooks += [each.register_post_accumulate_grad_hook(self._on_gradient) for each in self._names]

    # --- one step -------------------------------------------------------------------------------------------------

    def submit(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Take a bucket; start each group whose last gradient this was; close the step after the last bucket."""
        if not self._open:
            self._raise_failure()
            self._begin()
        future: Future[Tensor] = Future()
        buffer = bucket.buffer()
        position = len(self._pending)
        self._pending.append((future, buffer))
        if buffer.layout is not torch.strided:
            self._run(lambda: self._average_sparse(position))
        else:
            self._take_bucket(bucket.parameters(), buffer)
        if bucket.is_last():
            self._end()
        # Through `then`, an exception keeps its text on its way out of a future.
        return future.then(lambda done: done.value())

    def _begin(self) -> None:
        self._open = True
        self._started = 0
        self._last = None
        self._arrived.clear()
        self._pending.clear()
        self._begun += 1
        if self._momentum is not None:
            self._momentum.adopt()
            self._inherit_velocities()
            self._hyper = self._momentum.of(self._names)
        scale = self._scaler.get_scale() if self._scaler is not None and self._scaler.is_enabled() else 1.0
        self.sync.begin(scale=scale)  # nothing runs between steps

    def _on_gradient(self, parameter: Tensor) -> None:
        """This gradient is ready. DDP copies it into its bucket right after this hook, so the one before is there."""
        if not self._awaited:
            return
        name = self._names[cast(Parameter, parameter)]
        if self._clock is not None:
            self._clock.stamp(name)
        if not self._early or not self._views or self._failure is not None:
            return
        if not self._open:
            self._begin()
        landed, self._last = self._last, name
        if landed in self._views:
            self._take(landed, self._views[landed])
            self._start_groups()

    def _take_bucket(self, parameters: list[Parameter], buffer: Tensor) -> None:
        fresh = []
        offset = 0
        for parameter in parameters:
            gradient = buffer[offset : offset + parameter.numel()]
            offset += parameter.numel()
            name = self._names[parameter]
            if name not in self._arrived:
                self._take(name, gradient)
                fresh.append(Member(name, parameter.numel()))
            assert self._arrived[name].gradient.data_ptr() == gradient.data_ptr(), "DDP's buckets have moved"
            if self._early and self._begun > self._provisional:
                self._views[name] = gradient
        unknown = [member for member in fresh if member.name not in self._expected]
        if self.config.groups == "bucket" and self._begun > self._provisional:
            self.sync.group_of(fresh)
        elif unknown:  # frozen at attach, but not when DDP wrapped the model
            self.sync.group_of(unknown)
        self._expected |= {member.name for member in fresh}
        self._start_groups()

    def _take(self, name: str, gradient: Tensor) -> None:
        unused = self._may_skip and not bool(gradient.any())
        self._arrived[name] = Part(name, gradient, self._hyper.get(name), unused)

    def _start_groups(self) -> None:
        """Start every group that is complete and whose turn it is: the order must be the same on all ranks."""
        while self._started < len(self.sync.groups):
            group = self.sync.groups[self._started]
            if not group.offsets.keys() <= self._arrived.keys():
                return
            self._start(group, [self._arrived[name] for name in group.offsets])
            self._started += 1

    def _start(self, group: Group, parts: list[Part]) -> None:
        if not self._lanes.run_ahead:
            self._run(lambda: self._synchronize(group, parts))
            return
        added = self._lanes.prepare(lambda: self._accumulate(group, parts))

        def exchange() -> None:
            added.result()
            self.sync.exchange(group)

        self._run(exchange)

    def _accumulate(self, group: Group, parts: list[Part]) -> None:
        if self._failure is None:
            self.sync.accumulate(group, parts)

    def _synchronize(self, group: Group, parts: list[Part]) -> None:
        if self._may_skip:
            parts = self._agree_on_unused(parts)
        self.sync.synchronize(group, parts)

    def _agree_on_unused(self, parts: list[Part]) -> list[Part]:
        """A parameter that any rank has used is used: only what none has used is dropped by DDP."""
        used = torch.tensor([not part.unused for part in parts], dtype=torch.float32, device=self._transport.device)
        self._transport.perform(AllReduce(used, name="agreement on unused parameters"))
        agreed = [replace(part, unused=not use) for part, use in zip(parts, used.tolist(), strict=True)]
        self._arrived.update((part.name, part) for part in agreed)
        return agreed

    def _average_sparse(self, position: int) -> None:
        future, buffer = self._pending[position]
        self._transport.perform(AllReduce(buffer))
        self.sync.poisoned |= not bool(torch.isfinite(buffer.coalesce().values()).all())
        self._pending[position] = (future, buffer / self._transport.workers)

    def _end(self) -> None:
        self._open = self._awaited = False
        self._run(self._finish)
        # Before DDP looks at the futures, so that errors come out of backward() as they are. A rank that has joined
        # early (DDP's Join) calls hooks outside any backward; there the futures alone carry them.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _finish(self) -> None:
        missing = sorted(self._expected - self._arrived.keys())
        if missing:
            raise ConfigError(
                f"DDP does not synchronise {missing[0]!r}: it was frozen when the model was wrapped;"
                " unfreeze parameters before wrapping the model, or freeze them before attach."
            )
        fine = self.sync.finish()
        if fine and self._momentum is not None:
            moving = (name for name, part in self._arrived.items() if not part.unused and self._hyper[name].momentum)
            self._momentum.started.update(moving)
        self._watch_backward()
        for future, buffer in self._pending:
            if not fine and buffer.layout is not torch.strided:
                buffer = buffer * torch.nan
            future.set_result(buffer)

    def _watch_backward(self) -> None:
        """Count this step's backward; when enough are known, plan, regroup, and let go of the clock."""
        if self._clock is None or self._begun <= self._provisional + WARM_UP:
            return
        self._clock.keep()
        if self._clock.passes < MEASURED:
            return
        sizes = {name: self._parameters[name].numel() for name in self._arrived}
        self.merging = agree(
            self.config,
            self._clock.reading(),
            sizes,
            self._transport,
            momentum=self._momentum is not None,
            device=self._transport.device,
        )
        members = [[Member(name, sizes[name]) for name in names] for names in self.merging.after.groups]
        self.sync.regroup(members, self.merging.densities)
        self._stop_clock()

    def _stop_clock(self) -> None:
        self._clock = None
        if not self._early:
            for hook in self._hooks:
                hook.remove()

    def _run(self, job: Callable[[], None]) -> None:
        self._lanes.run(lambda: self._guarded(job))

    def _guarded(self, job: Callable[[], None]) -> None:
        """After a failure nothing else runs: every future that DDP waits for carries the error instead."""
        if self._failure is None:
            try:
                job()
            except BaseException as error:
                self._failure = error
                self._lanes.stop_preparing()  # nothing must be added to what is rolled back
                self.sync.abandon()
        if self._failure is not None:
            for future, _ in self._pending:
                if not future.done():
                    future.set_exception(self._failure)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Return when the communication thread has nothing left to do."""
        self._lanes.wait()

    def _after_backward(self) -> None:
        self.wait()
        self._raise_failure()

    def _before_forward(self, model: DistributedDataParallel, *_: Any) -> None:
        """After a failure DDP's next step would end in an internal error, or wait for the rank that is gone."""
        if torch.is_grad_enabled():
            self._raise_failure()
            self._awaited = model.require_backward_grad_sync
            if self._clock is not None:
                self._clock.forward_begins()

    def _after_forward(self, *_: Any) -> None:
        if self._clock is not None and torch.is_grad_enabled():
            self._clock.forward_ends()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- setting up -----------------------------------------------------------------------------------------------

    def _move_momentum(self, optimizer: Optimizer | Literal[False] | None) -> LocalMomentum | None:
        dense = issubclass(method_class(self.config.method), Dense) or self.config.density == 1.0
        if optimizer is None and not dense:
            warnings.warn(
                "attach was not given the optimizer. If it is SGD with momentum or weight decay, entries that wait for"
                " their turn arrive without their momentum and training lags behind dense; pass optimizer=... to move"
                " it before the selection, or optimizer=False if there is none to move.",
                SparDLWarning,
                stacklevel=4,
            )
        if optimizer and LocalMomentum.settings_of(optimizer) is not None:
            return LocalMomentum(optimizer, self._names)
        return None

    def _initial_groups(self) -> list[list[Member]]:
        """Backward reaches the last registered parameters first, so groups run from there."""
        expected = [item for item in reversed(self._parameters.items()) if item[0] in self._expected]
        members = [Member(name, parameter.numel()) for name, parameter in expected]
        return partition(members, self.config.groups) if isinstance(self.config.groups, int) else [members]

    def _check_agreement(self, optimizer: Optimizer | None) -> None:
        facts = self.config.to_dict()
        facts["parameters"] = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in self._parameters.items()]
        facts["momentum"] = LocalMomentum.settings_of(optimizer)
        check_agreement(facts, self._transport.gather_texts, "configuration or model")

    def _inherit_velocities(self) -> None:
        """Momentum that the optimizer already had is every rank's velocity: their mean is what it was."""
        if self._momentum is not None:
            for name, velocity in self._momentum.take_velocities().items():
                self.sync.set_velocity(name, velocity)

    # --- the rest of its life -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        self._inherit_velocities()
        started = [] if self._momentum is None else sorted(self._momentum.started)
        planned = self.config.merge is not None and self._clock is None
        return {**self.sync.state_dict(), "started": started, "planned": planned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        self._inherit_velocities()
        planned = bool(state.get("planned"))
        self.sync.load_state_dict(state, regroup=self.config.groups == "bucket" or planned)
        if planned and self._clock is not None:
            self._stop_clock()
        if self._momentum is not None:
            self._momentum.started = set(state.get("started", ()))

    def detach(self) -> None:
        """Go dense for good: see `SyncHandle.detach`."""
        self.wait()
        self._inherit_velocities()
        self.sync.go_dense()
        self.config = self.sync.config
        if self._momentum is not None:
            self._momentum.restore(*self.sync.drain(self._momentum.stepped_names()))
            self._momentum = None
            self._hyper = {}


class SyncHandle:
    """What `attach` returns."""

    def __init__(self, state: SparDLState) -> None:
        self.state = state

    @property
    def config(self) -> SyncConfig:
        """The settings in force."""
        return self.state.config

    @property
    def merging(self) -> Merging | None:
        """With `merge`: what was measured and planned, to print and to draw; None until enough steps are known."""
        self.state.wait()
        return self.state.merging

    def stats(self) -> SyncStats:
        """Per group and in total: entries, bytes, bits per entry, density; seconds selecting, packing, waiting and
        transferring."""
        self.state.wait()
        return self.state.sync.stats()

    def state_dict(self) -> dict[str, Any]:
        """Residuals, velocities and controllers of *this rank*: save one file per rank, beside the model."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this rank's `state_dict`, exactly."""
        self.state.load_state_dict(state)

    def detach(self) -> None:
        """Stop sparsifying. Collective, between steps. DDP cannot drop a hook, so it stays and averages densely.

        Nothing is lost. Residuals that hold gradients are sent by the next step. Where momentum was local they hold
        updates, which are applied now, at the present learning rate; momentum and weight decay go back to the
        optimizer, with the mean velocity as its momentum.
        """
        self.state.detach()


def _check_types(model: object, optimizer: object, scaler: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"attach needs a DistributedDataParallel model, not {type(model).__name__}; wrap it first.")
    if getattr(model, "_comm_hooks", None):
        raise ConfigError("this model has a communication hook already, and DDP takes only one; wrap the module anew.")
    if optimizer is not None and optimizer is not False and not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer={optimizer!r} is not a torch optimizer; pass the one that steps this model.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler={scaler!r} is not a torch.amp.GradScaler; leave it out if there is none.")


def _with_teams(config: SyncConfig, group: ProcessGroup, team_size: int | None, workers: int) -> SyncConfig:
    """Teams may also be given as a size, or as the first dimension of a mesh."""
    if team_size is not None:
        if config.teams != "auto":
            raise ConfigError(f"give teams={config.teams} or team_size={team_size}, not both.")
        if team_size < 1 or workers % team_size:
            raise ConfigError(f"{workers} workers cannot form teams of {team_size}; choose a divisor of {workers}.")
        return replace(config, teams=workers // team_size)
    if group is not None and not isinstance(group, dist.ProcessGroup) and group.ndim == 2 and config.teams == "auto":
        return replace(config, teams=group.size(0))
    return config


def _dense_parameters(model: DistributedDataParallel) -> dict[str, Parameter]:
    """The parameters that may have dense gradients, by name, in registration order; also those frozen now."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    sparse = {id(m.weight) for m in model.module.modules() if isinstance(m, Embedding | EmbeddingBag) and m.sparse}
    found = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if name not in ignored and id(parameter) not in sparse
    }
    if not any(parameter.requires_grad for parameter in found.values()):
        raise ConfigError(
            "this model has no parameter with a dense gradient, so there is nothing to synchronise sparsely."
        )
    if any(parameter.is_complex() for parameter in found.values()):
        raise ConfigError("complex parameters cannot be synchronised sparsely; let DDP ignore them, or make them real.")
    return found
