"""Where a step of training ends: when every optimizer of a model has stepped, or a scaler has skipped it."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spardl import _torch_private
from spardl.errors import SparDLWarning, StateError
from spardl.host import Flag, all_hold, holds
from spardl.integrations.parts import is_sharded

PATIENCE = 10  # steps in a row that are left out

UNKNOWN_SCALER = (
    "A GradScaler steps this optimizer, and attach was not given it: a step that it skips on one rank would keep the"
    " others waiting. Pass scaler=... to attach."
)


class Boundary:
    """Calls `over` once per step.

    A scaler decides on each rank by itself whether to step. The others cannot know, so a step that it skips is a step
    like others, in which nothing has moved. Where there is none, a rank whose gradient is not finite leaves its own
    step out: it would ruin this rank's weights for good. `names` are those of the parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        over: Callable[[], None],
        scaler: torch.amp.GradScaler | None,
        names: Mapping[Tensor, str],
    ) -> None:
        self._all = {id(each) for each in optimizers}
        self._names = names
        self._left_out = 0  # steps in a row
        self._over = over
        self._stepped: set[int] = set()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._asked = scaler is not None  # whether somebody has looked for a scaler
        self._hooks: list[RemovableHandle] = [each.register_step_post_hook(self._after_step) for each in optimizers]
        if self._scaler is None:
            self._hooks += [each.register_step_pre_hook(self._before_step) for each in optimizers]
        else:
            self._step_by_scaler = self._scaler.step
            self._scaler.step = self._scaled_step  # type: ignore[method-assign]

    def end(self) -> None:
        """Let go of the optimizers, and of the scaler."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._scaler is not None:
            del self._scaler.step
            self._scaler = None

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Take all gradients away if any is not finite: optimizers leave out parameters that have none."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        # Of a model in parts no rank leaves a step out by itself: the exchange is refused by all of them.
        whole = [each for each in parameters if not is_sharded(each.grad)]
        flags = [_is_finite(each.grad) for each in whole]
        fine = all_hold(flags)  # a device is asked once for all
        broken = None if fine else next(each for each, flag in zip(whole, flags, strict=True) if not holds(flag))
        self._left_out = 0 if broken is None else self._left_out + 1
        if broken is None:
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        what = f"the gradient of {self._names.get(broken, 'a parameter')!r} on rank {rank} was not finite"
        if self._left_out >= PATIENCE:
            raise StateError(
                f"For {self._left_out} steps in a row {what}, and none of them was taken; go back to a checkpoint with"
                " a lower learning rate, clip gradients, or pass scaler=... if a GradScaler is in use."
            )
        if self._left_out == 1:
            warnings.warn(
                f"In this step {what}. This rank leaves it out: its weights and its optimizer are as they were before."
                " If a GradScaler is in use, pass scaler=... to attach.",
                SparDLWarning,
                stacklevel=2,
            )
        for each in parameters:
            each.grad = None

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if _torch_private.is_rehearsal():
            return
        if not self._asked:
            self._asked = True
            if called_by(torch.amp.GradScaler):
                raise StateError(UNKNOWN_SCALER)
        if self._scaler is None:
            self._note(optimizer)

    def _scaled_step(self, optimizer: Optimizer, *given: Any, **named: Any) -> Any:
        result = self._step_by_scaler(optimizer, *given, **named)
        self._note(getattr(optimizer, "optimizer", optimizer))
        return result

    def _note(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._all:
            self._stepped.add(id(optimizer))
        if self._stepped == self._all:
            self._stepped.clear()
            self._over()


def _is_finite(gradient: Tensor) -> Flag:
    """By one pass over its values, without a copy."""
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return not values.numel() or torch.isfinite(torch.linalg.vector_norm(values, torch.inf))


def called_by(kind: type) -> bool:
    """Whether a method of such an object is among the callers."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            return True
        frame = frame.f_back
    return False
