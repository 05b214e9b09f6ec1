"""Gradients that are synchronised when the optimizer steps: one exchange for a whole model, or for a part of one.

It needs nothing of whoever computes gradients, so it serves FSDP2, tensor parallel and plain modules alike, and
accumulation, clipping and whatever else happens before the step need no care. It does not overlap with backward.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Embedding, EmbeddingBag
from torch.optim import Optimizer

from spardl import _torch_private
from spardl.config import SyncConfig
from spardl.errors import ConfigError, StateError
from spardl.host import Flag, holds
from spardl.integrations import ranks
from spardl.integrations.boundary import UNKNOWN_SCALER, called_by
from spardl.integrations.gradients import GradientHandle
from spardl.integrations.model import facts_of, parts_as_members, stepped_parameters
from spardl.integrations.optim.momenta import Momenta
from spardl.integrations.optim.momentum import LocalMomentum, flatten, in_memory_order, is_gapless, unflatten
from spardl.integrations.parts import gather_anew, is_sharded, mesh_of, part_of
from spardl.integrations.refusals import Refusals
from spardl.sync.plan import plan_group
from spardl.sync.session import Session
from spardl.transport.members import Group

REFUSED = (
    "In this step {who} not finite. The optimizer has left all weights as they were, on all ranks. If a GradScaler is"
    " in use, pass scaler=... to attach."
)
REFUSED_OFTEN = (
    "For {count} steps in a row {who} not finite, and none of them has changed a weight; lower the learning rate, or"
    " clip gradients before the step."
)


class StepSync(GradientHandle):
    """What `attach(..., when="step")` returns. Making one is collective, and gives all ranks the weights of rank 0.

    Args:
        model: any module that averages nothing between replicas by itself.
        optimizer: the one that steps it. Momentum and weight decay of an SGD move before the selection.
        config: how gradients are exchanged.
        scaler: the GradScaler in use; gradients are then synchronised when it unscales them.
        process_group: the ranks that take part; of a model in parts, those that hold the same part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: SyncConfig,
        *,
        scaler: torch.amp.GradScaler | None = None,
        process_group: Group = None,
    ) -> None:
        if any(isinstance(each, Embedding | EmbeddingBag) and each.sparse for each in model.modules()):
            raise ConfigError("gradients of an embedding with sparse=True cannot wait; build it with sparse=False.")
        gather_anew(model)
        self._parameters = stepped_parameters(model, [optimizer])
        trained = {name: each for name, each in reversed(self._parameters.items()) if each.requires_grad}
        momentum = LocalMomentum.settings_of(optimizer)
        self.session = Session.open(
            parts_as_members(trained),
            config,
            process_group=process_group,
            parts=mesh_of(self._parameters, process_group),
            device=next(iter(self._parameters.values())).device,
            facts={"parameters": facts_of(self._parameters), "momentum": momentum},
            momentum=momentum is not None,
        )
        ranks.begin_alike(model, self.session.transport)
        self._momenta = Momenta([optimizer], self._parameters, self.session)
        self._refusals = Refusals(REFUSED, REFUSED_OFTEN)
        self._optimizer = optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._asked = scaler is not None  # whether somebody has looked for a scaler
        self._synchronised = False  # by the scaler, for the step that comes
        optimizer.register_step_pre_hook(self._before_step)
        if self._scaler is not None:
            self._unscale = self._scaler.unscale_
            self._scaler.unscale_ = self._before_unscaling  # type: ignore[method-assign]

    # --- one step -------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _torch_private.is_rehearsal():
            return
        if any(each is not None for each in (*given[1:], named.get("closure"))):  # Accelerate gives None
            raise StateError(
                "optimizer.step(closure) computes gradients when it is too late to synchronise them; call backward()"
                ' before step(), or use update="local".'
            )
        if not self._asked:
            self._asked = True
            if called_by(torch.amp.GradScaler):
                raise StateError(UNKNOWN_SCALER)
        if not self._synchronised:
            self._synchronise(scale=1.0)
        self._synchronised = False

    def _before_unscaling(self, optimizer: Optimizer) -> None:
        """A scaler looks for values that are not finite here: all ranks must find the same."""
        if getattr(optimizer, "optimizer", optimizer) is self._optimizer:
            assert self._scaler is not None
            self._synchronise(scale=self._scaler.get_scale())
            self._synchronised = True
        self._unscale(optimizer)

    @torch.no_grad()
    def _synchronise(self, *, scale: float) -> None:
        started = time.perf_counter()
        session = self.session
        session.check()
        rules = self._momenta.rules(loaded=self._loaded)
        flat = self._gradients()
        session.begin(scale=scale, instead=torch.nan)
        for name, gradient in flat.items():
            session.submit(name, gradient, momentum=rules.get(name))
        counted = session.close().result()
        session.seconds_exposed += time.perf_counter() - started  # nothing else runs meanwhile
        if counted or self._scaler is not None:
            self._write(flat)
        else:
            self._refuse(flat)
        if self._scaler is None:
            self._refusals.note(counted, self._who)

    def _gradients(self) -> dict[str, Tensor]:
        """Flat, in the order of the weights' memory: the gradient itself where it lies like that, else a copy."""
        self._fine: dict[str, Flag] = {}  # read only if a step is refused
        found = {}
        for name, parameter in self._parameters.items():
            if not part_of(parameter).numel() or (parameter.grad is None and not self.session.sync.knows(name)):
                continue
            if parameter.grad is None:
                raise StateError(
                    f"{name!r} has no gradient in this step, and every parameter is part of every exchange; leave it"
                    ' out of the optimizer, freeze it before attach, or use update="local", which does not mind.'
                )
            if not self.session.sync.knows(name):  # frozen at attach
                self.session.include(
                    plan_group(self.session.config, parts_as_members({name: parameter}), self.session.transport.workers)
                )
            found[name] = flat_gradient(parameter)
            self._fine[name] = torch.isfinite(found[name]).all()
        return found

    def _write(self, flat: Mapping[str, Tensor]) -> None:
        """Results of copies go to where the optimizer looks."""
        for name, result in flat.items():
            parameter = self._parameters[name]
            gradient = parameter.grad
            assert gradient is not None
            if part_of(gradient).data_ptr() != result.data_ptr():
                parameter.grad = unflatten(result, parameter)

    def _refuse(self, flat: Mapping[str, Tensor]) -> None:
        """An optimizer leaves parameters without a gradient as they are, with its moments."""
        for name in flat:
            self._parameters[name].grad = None

    def _who(self) -> str:
        bad = [name for name, fine in self._fine.items() if not holds(fine)]
        return f"this rank's gradient of {bad[0]!r} was" if bad else "some rank's gradient was"


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, in the order of the weights' memory: in place where it can be."""
    gradient = parameter.grad
    assert gradient is not None
    if is_sharded(gradient) and is_sharded(parameter) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    part = part_of(gradient)
    if part.stride() == part_of(parameter).stride() and is_gapless(part):
        return in_memory_order(part)
    return flatten(gradient, parameter)
