"""Where a step of training ends: when every optimizer of a model has stepped, or a scaler has skipped it."""

import inspect
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spardl import _torch_private
from spardl.errors import StateError

UNKNOWN_SCALER = (
    "A GradScaler steps this optimizer, and attach was not given it: a step that it skips on one rank would keep the"
    " others waiting. Pass scaler=... to attach."
)


class Boundary:
    """Calls `over` once per step.

    A scaler decides on each rank by itself whether to step. The others cannot know, so a step that it skips is a step
    like others, in which nothing has moved.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], over: Callable[[], None], scaler: torch.amp.GradScaler | None
    ) -> None:
        self._all = {id(each) for each in optimizers}
        self._over = over
        self._stepped: set[int] = set()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._asked = scaler is not None  # whether somebody has looked for a scaler
        self._hooks: list[RemovableHandle] = [each.register_step_post_hook(self._after_step) for each in optimizers]
        if self._scaler is not None:
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


def called_by(kind: type) -> bool:
    """Whether a method of such an object is among the callers."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            return True
        frame = frame.f_back
    return False
