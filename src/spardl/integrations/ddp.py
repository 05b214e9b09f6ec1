"""One line on a DistributedDataParallel model.

DDP's buckets merely deliver gradients: state is keyed by parameter name, so a rebuild of the buckets does not matter.
All exchanges run on one communication thread, in the order in which DDP launches its buckets, while backward goes on.
(This module must not postpone annotations: DDP compares the hook's with the real types.)
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spardl.accumulator import Momentum
from spardl.collectives.program import AllReduce
from spardl.config import SyncConfig
from spardl.errors import ConfigError, SparDLWarning
from spardl.integrations.momentum import LocalMomentum
from spardl.metrics import SyncStats
from spardl.sync import Group, Member, Part, Synchronizer, check_agreement, partition
from spardl.transport.torchdist import Group as ProcessGroup
from spardl.transport.torchdist import TorchTransport
from spardl.version import __version__


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
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"attach needs a DistributedDataParallel model, not {type(model).__name__}; wrap it first.")
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
        self.config = _configure(config, settings)
        self._parameters = _dense_parameters(model)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._scaler = scaler
        self._holds_unused = bool(model.find_unused_parameters or model.static_graph)
        device = next(iter(self._parameters.values())).device
        where = process_group if process_group is not None else model.process_group
        transport = TorchTransport(where, timeout=self.config.timeout, device=device)
        self.config = _with_teams(self.config, process_group, team_size, transport.workers)
        self.config.resolved_gather(transport.workers)  # teams that cannot work are refused here
        self._momentum = self._move_momentum(optimizer)
        self._transport = transport
        self._check_agreement()
        self.sync = Synchronizer(self.config, transport, momentum=self._momentum is not None, device=device)
        self.sync.regroup(self._initial_groups())
        self._adopt_buffers()
        # Only a CPU needs a thread to overlap; on other devices the stream does it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spardl") if device.type == "cpu" else None
        self._arrived: dict[str, Part] = {}
        self._pending: list[tuple[Future[Tensor], Tensor]] = []
        self._failure: BaseException | None = None

    # --- one step -------------------------------------------------------------------------------------------------

    def submit(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Take a bucket; start each group whose last gradient this was; close the step after the last bucket."""
        if self._failure is not None:
            raise self._failure
        if bucket.index() == 0:
            self._begin()
        future: Future[Tensor] = Future()
        buffer = bucket.buffer()
        position = len(self._pending)
        self._pending.append((future, buffer))
        if buffer.layout is not torch.strided:
            self._run(lambda: self._average_sparse(position))
        else:
            for group, parts in self._complete_groups(bucket.parameters(), buffer):
                self._run(lambda group=group, parts=parts: self.sync.synchronize(group, parts))  # type: ignore[misc]
        if bucket.is_last():
            self._run(self._finish)
        # Through `then`, an exception keeps its type and text on its way out of backward().
        return future.then(lambda done: done.value())

    def _begin(self) -> None:
        self._arrived.clear()
        self._pending.clear()
        self._hyper: dict[Parameter, Momentum] = {}
        if self._momentum is not None:
            self._momentum.adopt()
            self._hyper = self._momentum.of(list(self._names))
        scaling = self._scaler is not None and self._scaler.is_enabled()
        scale = float(self._scaler.get_scale()) if scaling and self._scaler is not None else 1.0
        self._run(lambda: self.sync.begin(scale=scale))

    def _complete_groups(self, parameters: list[Parameter], buffer: Tensor) -> Iterable[tuple[Group, list[Part]]]:
        offset = 0
        members = []
        for parameter in parameters:
            gradient = buffer[offset : offset + parameter.numel()]
            offset += parameter.numel()
            name = self._names[parameter]
            unused = self._holds_unused and not bool(gradient.any())
            self._arrived[name] = Part(name, gradient, self._hyper.get(parameter), unused)
            members.append(Member(name, parameter.numel()))
        if self.config.groups == "bucket":
            group = self.sync.group_of(members)
            return [(group, [self._arrived[member.name] for member in members])]
        fresh = {member.name for member in members}
        return [
            (group, [self._arrived[name] for name in group.offsets])
            for group in self.sync.groups
            if fresh & group.offsets.keys() and group.offsets.keys() <= self._arrived.keys()
        ]

    def _average_sparse(self, position: int) -> None:
        future, buffer = self._pending[position]
        self._transport.perform(AllReduce(buffer))
        self._pending[position] = (future, buffer / self._transport.workers)

    def _finish(self) -> None:
        fine = self.sync.finish()
        if fine and self._momentum is not None:
            self._momentum.started = True
        for future, buffer in self._pending:
            if not fine and buffer.layout is not torch.strided:
                buffer = buffer * torch.nan
            future.set_result(buffer)

    def _run(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._guarded(job)
        else:
            self._thread.submit(self._guarded, job)

    def _guarded(self, job: Callable[[], None]) -> None:
        """After a failure nothing else runs: every future that DDP waits for carries the error instead."""
        if self._failure is None:
            try:
                job()
            except BaseException as error:
                self._failure = error
        if self._failure is not None:
            for future, _ in self._pending:
                if not future.done():
                    future.set_exception(self._failure)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Return when the communication thread has nothing left to do."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    # --- setting up -----------------------------------------------------------------------------------------------

    def _move_momentum(self, optimizer: Optimizer | Literal[False] | None) -> LocalMomentum | None:
        if optimizer is None and self.config.method != "dense":
            warnings.warn(
                "attach was not given the optimizer. If it is SGD with momentum or weight decay, entries that wait for"
                " their turn arrive without their momentum and training lags behind dense; pass optimizer=... to move"
                " it before the selection, or optimizer=False if there is none to move.",
                SparDLWarning,
                stacklevel=4,
            )
        if optimizer and LocalMomentum.applies_to(optimizer):
            return LocalMomentum(optimizer)
        return None

    def _initial_groups(self) -> list[list[Member]]:
        """Backward reaches the last registered parameters first, so groups run from there."""
        members = [Member(name, parameter.numel()) for name, parameter in reversed(self._parameters.items())]
        return partition(members, self.config.groups) if isinstance(self.config.groups, int) else [members]

    def _check_agreement(self) -> None:
        facts = {"spardl version": __version__, **self.config.to_dict()}
        facts["parameters"] = [[n, list(p.shape), str(p.dtype)] for n, p in self._parameters.items()]
        facts["momentum"] = None if self._momentum is None else self._momentum.state_dict()["settings"]
        text = json.dumps(facts)
        digests = self._transport.gather_texts(hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) > 1:
            check_agreement(self._transport.gather_texts(text), "configuration or model")

    def _adopt_buffers(self) -> None:
        """Momentum that the optimizer already had is every rank's velocity: their mean is what it was."""
        for parameter, buffer in self._momentum.buffers().items() if self._momentum is not None else ():
            name = self._names.get(parameter)
            for group in self.sync.groups:
                if name in group.offsets:
                    group.memory.acc.write_velocity(group.offsets[name], buffer)

    # --- the rest of its life -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        momentum = None if self._momentum is None else self._momentum.state_dict()
        return {**self.sync.state_dict(), "momentum": momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait()
        self.sync.load_state_dict(state)
        if self._momentum is not None and state.get("momentum") is not None:
            self._momentum.load_state_dict(state["momentum"])

    def detach(self) -> None:
        """Go dense for good: see `SyncHandle.detach`."""
        self.wait()
        velocities = self.sync.go_dense()
        if self._momentum is not None:
            self._momentum.restore({self._parameters[name]: velocity for name, velocity in velocities.items()})
            self._momentum = None


class SyncHandle:
    """What `attach` returns."""

    def __init__(self, state: SparDLState) -> None:
        self.state = state

    @property
    def config(self) -> SyncConfig:
        """The settings in force."""
        return self.state.config

    def stats(self) -> SyncStats:
        """Per group and in total: entries, bytes, bits per entry, density, time selecting, waiting, transferring."""
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

        The next step sends what the residuals still hold, so nothing is lost; momentum and weight decay go back to
        the optimizer, with the mean velocity as its momentum.
        """
        self.state.detach()


def _configure(config: SyncConfig | None, settings: dict[str, Any]) -> SyncConfig:
    try:
        return replace(config, **settings) if config is not None else SyncConfig(**settings)
    except TypeError as error:
        known = ", ".join(SyncConfig.__dataclass_fields__)
        raise ConfigError(f"{str(error).split('__init__() ')[-1]}; the settings are {known}.") from None


def _with_teams(config: SyncConfig, group: ProcessGroup, team_size: int | None, workers: int) -> SyncConfig:
    """Teams may also be given as a size, or as the first dimension of a mesh."""
    if team_size is not None:
        if team_size < 1 or workers % team_size:
            raise ConfigError(f"{workers} workers cannot form teams of {team_size}; choose a divisor of {workers}.")
        return replace(config, teams=workers // team_size)
    if group is not None and not isinstance(group, dist.ProcessGroup) and group.ndim == 2 and config.teams == "auto":
        return replace(config, teams=group.size(0))
    return config


def _dense_parameters(model: DistributedDataParallel) -> dict[str, Parameter]:
    """The parameters that DDP synchronises with dense gradients, by name, in registration order."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    sparse = {id(m.weight) for m in model.module.modules() if isinstance(m, Embedding | EmbeddingBag) and m.sparse}
    found = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored and id(parameter) not in sparse
    }
    if not found:
        raise ConfigError(
            "this model has no parameter with a dense gradient, so there is nothing to synchronise sparsely."
        )
    return found
