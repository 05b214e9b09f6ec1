"""FSDP2 inside backward: the hook that every sharded module calls once its gradients lie where they belong.

`fully_shard` on a mesh of one dimension reduces gradients between the parts of a replica, and then calls this hook with
a module's flat shard, in the middle of backward: here it is averaged between replicas, sparsely. What FSDP2 does on a
mesh of two dimensions comes before the hook, so such a model is refused.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from spardl import _torch_private
from spardl.choices import is_count
from spardl.config import SyncConfig
from spardl.errors import ConfigError, StateError
from spardl.host import holds
from spardl.integrations import ranks
from spardl.integrations.handle import SyncHandle
from spardl.integrations.model import facts_of
from spardl.integrations.parts import gather_anew, mesh_of
from spardl.integrations.refusals import Refusals
from spardl.metrics import StepEvent
from spardl.sync.plan import Member
from spardl.sync.session import Session, spans_of, tell
from spardl.sync.state import SAME
from spardl.transport.members import Group

REFUSED = (
    "In this backward {who} not finite. All ranks got zeros instead, and its residual is as it was. If a GradScaler is"
    " in use, pass scaler=... to attach."
)
REFUSED_OFTEN = (
    "{count} times in a row {who} not finite, and no weight was changed; lower the learning rate, or clip gradients."
)


@dataclass(slots=True)
class _Pass:
    """One backward pass, from its first module's gradients on: what a step is to observers."""

    bytes_before: int
    entries_before: int
    opened: float = field(default_factory=time.perf_counter)
    names: set[str] = field(default_factory=set)
    counted: bool = True


class BackwardSync(SyncHandle):
    """What `attach(..., when="backward")` returns for FSDP2.

    Making one is collective, and gives all replicas the weights of the first.

    Each sharded module is a group of its own and counts by itself; a backward pass is a step to observers and to
    densities that change. Momentum stays in the optimizer, behind the selection. While micro-batches are accumulated,
    `set_requires_gradient_sync(False)` keeps the hook from running.

    Args:
        model: of `fully_shard`ed modules.
        config: how gradients are exchanged.
        scaler: the GradScaler in use.
        process_group: the ranks that hold the same parts of other replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SyncConfig,
        *,
        scaler: torch.amp.GradScaler | None = None,
        process_group: Group = None,
    ) -> None:
        gather_anew(model)
        modules = sharded_modules(model)
        parameters = dict(model.named_parameters())
        mesh = mesh_of(parameters, process_group)
        if any(isinstance(each, DTensor) and each.device_mesh.ndim > 1 for each in parameters.values()):
            raise ConfigError(
                "a module's gradients are one vector in backward, in which parts and copies of a tensor-parallel model"
                ' would mix; leave when="backward" out, and they are synchronised at the step.'
            )
        if not hasattr(FSDPModule, "set_all_reduce_hook"):
            raise ConfigError(
                f'torch {torch.__version__} has no FSDPModule.set_all_reduce_hook; leave when="backward" out, and'
                " gradients are synchronised at the step, or take a newer torch."
            )
        self._sizes = {name: flat_size(each) for name, each in modules.items()}
        self.session = Session.open(
            # Backward reaches the last one first. Each is a group of its own: a kind that no other has.
            [Member(name, size, name) for name, size in reversed(self._sizes.items())],
            config,
            process_group=process_group,
            parts=mesh,
            device=next(iter(parameters.values())).device,
            facts={"parameters": facts_of(parameters), "modules": list(self._sizes.items())},
            commit="group",
        )
        ranks.begin_alike(model, self.session.transport)
        self._scaled = scaler is not None and scaler.is_enabled()
        self._refusals = Refusals(REFUSED, REFUSED_OFTEN)
        self._passes = 0  # that are over
        self._pass: _Pass | None = None
        for name, module in modules.items():
            module.set_all_reduce_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def reduce(gradients: Tensor) -> None:
            if gradients.numel() != self._sizes[name]:
                raise StateError(
                    f"{name!r} has gradients for {gradients.numel()} elements in this backward, of"
                    f" {self._sizes[name]}: some of its parameters were not used, or were frozen after attach. Use"
                    ' when="step", or update="local".'
                )
            own = torch.isfinite(gradients).all()
            under_way = self._opened_for(name)
            counted = self.session.reduce(name, gradients, step=self._passes)
            under_way.counted &= counted
            if not counted and not self._scaled:
                gradients.zero_()
            if not self._scaled:
                mine = f"this rank's gradients of {name!r} were"
                self._refusals.note(counted, lambda: "some rank's gradients were" if holds(own) else mine)
            if under_way.names == self._sizes.keys():
                self._end_pass()

        return reduce

    # --- what a step is ---------------------------------------------------------------------------------------------

    def _opened_for(self, name: str) -> _Pass:
        """The pass that this module is part of. One is over with its last module, or with backward if that leaves some
        out; a module that comes again is of the next."""
        if self._pass is not None and name in self._pass.names:
            self._end_pass()
        if self._pass is None:
            self._pass = _Pass(self.session.transport.traffic.bytes_sent, self._entries())
            _torch_private.after_backward(self._end_pass)
        self._pass.names.add(name)
        return self._pass

    def _end_pass(self) -> None:
        """Tell observers of the pass under way, if there is one."""
        over, self._pass = self._pass, None
        if over is None:
            return
        groups = [each for each in self.session.sync.groups if over.names & each.offsets.keys()]
        event = StepEvent(
            step=self._passes,
            seconds=time.perf_counter() - over.opened,
            counted=over.counted,
            groups=len(groups),
            elements=sum(self._sizes[name] for name in over.names),
            entries=self._entries() - over.entries_before,
            bytes_sent=self.session.transport.traffic.bytes_sent - over.bytes_before,
            spans=spans_of(groups, over.opened) if self.session.observers else (),
        )
        self._passes += 1
        tell(self.session, event)

    def _entries(self) -> int:
        return sum(each.stats.entries for each in self.session.sync.groups)

    # --- state ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        super()._settle()
        self._end_pass()

    def _extras(self) -> dict[str, Any]:
        return {"passes": self._passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        passes = state.get("passes", 0)
        if not is_count(passes):
            raise StateError(f"this state was saved after {passes!r} backward passes, which cannot be; {SAME}")
        super().load_state_dict(state)
        self._passes = passes


def sharded_modules(model: nn.Module) -> dict[str, FSDPModule]:
    """The modules that reduce gradients of their own, by name, in registration order.

    Raises:
        ConfigError: there is none.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule) and flat_size(each)}
    if not found:
        raise ConfigError('when="backward" is for models that fully_shard has sharded; give when="step" for others.')
    return {name or "(root)": each for name, each in found.items()}


def flat_size(module: FSDPModule) -> int:
    """How many elements a module's hook is given: its trained parameters', each cut up evenly and padded."""
    assert isinstance(module, nn.Module)
    return sum(_padded_part(each) for each in trained_parameters(module))


def _padded_part(parameter: DTensor) -> int:
    cut = parameter.placements[0]
    rows = parameter.size(cut.dim if isinstance(cut, Shard) else 0)
    return -(-rows // parameter.device_mesh.size(0)) * (parameter.numel() // rows)


def trained_parameters(module: nn.Module) -> list[DTensor]:
    """Those that a sharded module itself looks after, and no sharded module inside it."""
    found = []
    for each in module.children():
        if not isinstance(each, FSDPModule):
            found += trained_parameters(each)
    own = [each for each in module.parameters(recurse=False) if each.requires_grad and each.numel()]
    return [*(each for each in own if isinstance(each, DTensor)), *found]
