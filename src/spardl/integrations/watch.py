"""What becomes of gradients between two synchronised backward passes: added to, applied, or thrown away.

DDP lets a backward add to a gradient that has been synchronised already, and synchronises the sum. That is right for an
average, which is linear; a residual must not be fed with what it has sent. So before a gradient is added to, this looks
at what is there: whatever a synchronised backward has left is `base`, which is neither sent nor averaged again.

If nothing is left and no optimizer has stepped in between, the gradient was thrown away, but its residual was not: that
is an error, for there is no way to take it back.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from spardl.errors import SparDLWarning, StateError
from spardl.host import holds
from spardl.integrations.hooks import Hook
from spardl.integrations.optim.choice import has_memory
from spardl.integrations.optim.momentum import flatten, in_memory_order
from spardl.metrics import StepEvent

PATIENCE = 10  # steps in a row that are refused, without a scaler to do something about it
PROBED = 1 << 16  # elements among which the largest delivered one is looked for

DISCARDED = (
    "The gradients of the last synchronised backward of this model were thrown away before any optimizer step, but they"
    " are in the residuals already and would be applied later. Run a backward whose gradients you do not use, with its"
    " forward, in `with model.no_sync():`, or turn requires_grad off for its time."
)


STALE = (
    "The optimizer has stepped since these gradients were synchronised, and they were not zeroed. They hold momentum"
    " already, which would be counted again; call optimizer.zero_grad() before the next backward, or, if that one's"
    " gradients are not used, run it with its forward in `with model.no_sync():`."
)


class GradientWatch:
    """Follows one model's gradients. Names are those of the session.

    Args:
        names: the model's parameters.
        given: the optimizers that are known to step it.
        moved: those of them whose momentum acts before the selection.
        holds: whether a parameter's gradients leave anything behind, to be applied later.
        quiet: say nothing of others.
    """

    def __init__(
        self,
        names: Mapping[Parameter, str],
        given: Sequence[Optimizer],
        moved: Sequence[Optimizer],
        holds: Callable[[str], bool],
        *,
        quiet: bool = False,
    ) -> None:
        self._names, self._holds = names, holds
        self._parameters = {name: parameter for parameter, name in names.items()}
        inner = [getattr(each, "optim", None) for each in given]  # ZeroRedundancyOptimizer steps one of its own
        self._given = [*given, *(each for each in inner if isinstance(each, Optimizer))]
        self._moved, self._quiet = list(moved), quiet
        self._synced: set[str] = set()  # whose gradient holds what a synchronised backward has left
        self._bases: dict[str, Tensor] = {}  # of those, what it held when it was added to
        self._stale: set[str] = set()  # of those, whose base an optimizer has stepped with
        self._touched: set[str] = set()  # whose gradient was computed since the last synchronised backward
        self._stepped: set[str] = set()  # since the last synchronised backward
        self._known: dict[int, tuple[weakref.ref[Optimizer], list[str], int]] = {}
        self._delivered = False
        self._probe: tuple[Parameter, int, float, float] | None = None
        self._refused = 0  # steps in a row
        self._told: set[str] = set()
        self._watched = {parameter for parameter in names if parameter.requires_grad}
        self._hooks: list[RemovableHandle] = [
            each.register_hook(Hook(self._before(each, names[each]))) for each in self._watched
        ]
        me = weakref.ref(self)
        self._hooks.append(register_optimizer_step_pre_hook(lambda o, *_: _call(me, GradientWatch._before_step, o)))
        self._hooks.append(register_optimizer_step_post_hook(lambda o, *_: _call(me, GradientWatch._after_step, o)))

    def stop(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # --- what the session asks ------------------------------------------------------------------------------------

    def take_base(self, name: str) -> Tensor | None:
        """What this gradient held of earlier synchronised passes, flat, in memory order; given out once.

        Raises:
            StateError: it holds momentum that an optimizer has stepped with, which would be counted again.
        """
        if name in self._stale and self._moved:
            raise StateError(STALE)
        return self._bases.pop(name, None)

    def is_unused(self, parameter: Parameter) -> bool:
        """Whether no backward since the last synchronised one has computed a gradient for this parameter."""
        return parameter not in self._watched or self._names[parameter] not in self._touched

    def synchronised(self, results: Mapping[str, Tensor], event: StepEvent, *, scaled: bool) -> None:
        """A backward has ended, with these results, which a GradScaler will change if they are `scaled`."""
        self._synced = set(results) & self._touched
        for noted in (self._stepped, self._stale, self._touched):
            noted.clear()
        self._delivered = event.counted and event.entries > 0
        self._probe = None if scaled or not self._delivered else self._largest(results)
        self._refused = 0 if event.counted or scaled else self._refused + 1
        if self._refused:
            self._on_refused()

    def _largest(self, results: Mapping[str, Tensor]) -> tuple[Parameter, int, float, float] | None:
        """One result, and its weight, to see whether anybody changes them before the step; none of a device, which the
        host would have to wait for."""
        if any(result.device.type != "cpu" for result in results.values()):
            return None
        seen = 0
        for name, result in results.items():
            stretch = result[: PROBED - seen]
            seen += stretch.numel()
            place = int(stretch.abs().argmax()) if stretch.numel() else 0
            value = float(stretch[place]) if stretch.numel() else 0.0
            if value:
                parameter = self._parameters[name]
                return parameter, place, value, float(in_memory_order(parameter)[place])
        return None

    def _on_refused(self) -> None:
        """Some rank's gradient was not finite, and there is no scaler to be told."""
        own = [n for p, n in self._names.items() if p.grad is not None and not holds(torch.isfinite(p.grad).all())]
        mine = f"rank {dist.get_rank()}'s" if dist.is_initialized() else "this rank's"
        who = f"{mine} gradient of {own[0]!r} was" if own else "some rank's gradient was"
        if self._refused >= PATIENCE:
            raise StateError(
                f"For {self._refused} steps in a row {who} not finite, and none of them has changed a weight; lower the"
                " learning rate, clip with clip_norm=..., or pass scaler=... if a GradScaler is in use."
            )
        if own:
            self._tell(
                "refused",
                f"In this step {who} not finite. All ranks got zeros instead, and residuals are as they were before it."
                " If a GradScaler is in use, pass scaler=... to attach.",
            )

    # --- while backward runs --------------------------------------------------------------------------------------

    def _before(self, parameter: Parameter, name: str) -> Callable[[Tensor], None]:
        """A gradient for this parameter has been computed, and is about to be added to `parameter.grad`."""

        def look(_: Tensor) -> None:
            self._touched.add(name)
            if name in self._synced or name in self._bases:
                self._look(parameter, name)

        return look

    def _look(self, parameter: Parameter, name: str) -> None:
        left = parameter.grad
        if left is None or not holds(left.any()):
            self._synced.discard(name)
            self._bases.pop(name, None)
            self._stale.discard(name)
            if self._delivered and name not in self._stepped and self._holds(name):
                self._on_discarded()
        elif name in self._synced:
            self._synced.discard(name)
            self._bases[name] = flatten(left, parameter)
            if name in self._stepped:
                self._stale.add(name)

    def _on_discarded(self) -> None:
        self._delivered = False
        if self._known or self._given:
            raise StateError(DISCARDED)
        if self._probe is not None:
            parameter, place, _, weight = self._probe
            if float(in_memory_order(parameter)[place]) != weight:
                return  # somebody steps by hand
        self._tell("discarded", DISCARDED)

    # --- when optimizers step -------------------------------------------------------------------------------------

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        """The parameters of this model that an optimizer steps."""
        known, groups = self._known.get(id(optimizer)), len(optimizer.param_groups)
        if known is not None and known[0]() is optimizer and known[2] == groups:
            return known[1]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [self._names[p] for p in parameters if p in self._names]
        if names:
            self._known[id(optimizer)] = (weakref.ref(optimizer), names, groups)
            if not self._quiet and optimizer not in self._given and has_memory(optimizer):
                self._tell(
                    "another optimizer",
                    f"{type(optimizer).__name__} steps this model, and attach was not given it: entries that wait for"
                    " their turn arrive without its momentum, and training lags behind dense. Pass optimizer=... (a"
                    " list, if there are several), or optimizer=False to be told no more.",
                )
        return names

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._probe is None or not self._names_of(optimizer):
            return
        parameter, place, value, _ = self._probe
        if optimizer not in self._moved or not any(parameter is p for g in optimizer.param_groups for p in g["params"]):
            return
        self._probe = None
        if parameter.grad is None or float(in_memory_order(parameter.grad)[place]) == value:
            return
        self._tell(
            "changed",
            "Gradients were changed between backward and step, by clip_grad_norm_ or a GradScaler perhaps. They hold"
            " momentum and what had waited, which such a change cuts into; pass clip_norm=... to attach, which clips"
            " before the selection, or scaler=...",
        )

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepped.update(self._names_of(optimizer))

    def _tell(self, what: str, text: str) -> None:
        """Warn of each thing once."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(text, SparDLWarning, stacklevel=3)


def _call(
    watch: "weakref.ref[GradientWatch]", method: Callable[[GradientWatch, Optimizer], None], optimizer: Any
) -> None:
    """Hooks of all optimizers outlive the model that they were made for."""
    alive = watch()
    if alive is not None:
        with torch.no_grad():
            method(alive, optimizer)
