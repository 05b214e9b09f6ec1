"""Adam before the selection: each worker divides its own gradient by the root of its second moment, then accumulates.

Behind the selection Adam goes wrong twice. Entries are chosen by the size of their gradient, which Adam is there to
level out. And an entry that waited a hundred steps arrives as one large value, which Adam takes for a noisy one: it
moves the weight by about ten steps' worth, not a hundred. Divided first, what waits adds up in units of the update, and
arrives whole. What remains is SGD with momentum, which `attach` moves before the selection as it does any other's.

Kingma and Ba, "Adam", ICLR 2015; with `decoupled` decay Loshchilov and Hutter, "AdamW", ICLR 2019.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from spardl.errors import ConfigError, StateError
from spardl.integrations.hooks import Hook


class LocalAdam(SGD):
    """Adam for a model that `attach` synchronises sparsely; pass it there. Not for use with a GradScaler.

    Not with `clip_grad_norm_` either: gradients have been divided when backward is over. Their size does not depend on
    the loss then; `attach(clip_norm=...)` bounds the norm of what is applied, over the learning rate.

    Each worker knows only its own second moment. Where gradients are mostly noise, the mean over workers has a variance
    that is smaller by their number, so the root is divided by the root of that: steps are as long as Adam's own there.

    A step that is skipped leaves moments as they were. They are each worker's own, and so is `state_dict()`.

    Args:
        params: parameters, or parameter groups with settings of their own, as for any torch optimizer.
        lr, betas, eps, weight_decay: as for `torch.optim.AdamW`.
        decoupled: whether weight decay is AdamW's or Adam's.
    """

    # Entries that are sent after a few steps keep their velocity: training loss is then closer to dense than with none
    # (docs/convergence.md). Under plain SGD it was harmful. See `Momentum.fade_after`.
    fade_after = 5.0

    # Momentum that is a mean over time, whatever a schedule makes of it: what is new weighs 1 - momentum.
    averages = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        given = list(params)
        in_groups = bool(given) and isinstance(given[0], dict)
        groups = cast(list[dict[str, Any]], given) if in_groups else [{"params": given}]
        own = {"betas": betas, "eps": eps, "decoupled": decoupled}
        super().__init__([_settled(group, own, weight_decay) for group in groups], lr=lr, momentum=betas[0])
        self._model: DistributedDataParallel | None = None
        self._is_continued: Callable[[Tensor], bool] = lambda _: False
        self._noise = 1.0
        self._refused = False
        self._next: dict[Tensor, tuple[Tensor, int]] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(Hook(self._hook(index)))

    def bind(self, model: DistributedDataParallel, is_continued: Callable[[Tensor], bool]) -> None:
        """Work for this model from now on; `attach` calls it.

        Args:
            model: tells whether a backward is the last one of a step, and how many workers there are.
            is_continued: whether a parameter's gradient is added to one that has been synchronised already.
        """
        self._model, self._is_continued = model, is_continued
        self._noise = dist.get_world_size(model.process_group) ** -0.5

    def refuse(self) -> None:
        """Some rank's gradient was not finite: the next `step` changes nothing."""
        self._next.clear()
        self._refused = True

    def step(self, closure: Any = None) -> Any:
        """Apply what was averaged, and keep the second moments that it was divided by."""
        if self._refused:
            self._refused = False
            return None if closure is None else closure()
        for parameter, (moment, count) in self._next.items():
            self.state[parameter].update(exp_avg_sq=moment, step=count)
        self._next.clear()
        with torch.no_grad():
            for group in self.param_groups:
                if group["decoupled"] and group["decay"]:
                    for parameter in group["params"]:
                        parameter.mul_(1.0 - float(group["lr"]) * group["decay"])
        return super().step(closure)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda parameter: self._divide(parameter, self.param_groups[index])

    @torch.no_grad()
    def _divide(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Runs when a gradient is complete, before DDP copies it; of several micro-batches, with the last one."""
        gradient = parameter.grad
        if gradient is None or (self._model is not None and not self._model.require_backward_grad_sync):
            return
        if gradient.layout is not torch.strided:
            raise ConfigError("LocalAdam takes dense gradients; build the embedding with sparse=False.")
        if self._is_continued(parameter):
            raise StateError(
                "LocalAdam divides a whole gradient once, and this is a second backward before optimizer.step(); run"
                " all but the last backward of a step, with its forward, in `with model.no_sync():`."
            )
        if group["decay"] and not group["decoupled"]:
            gradient = gradient.add(parameter, alpha=group["decay"])
        memory, old = self.state.get(parameter, {}), group["betas"][1]
        count = memory.get("step", 0) + 1
        before = memory["exp_avg_sq"] if "exp_avg_sq" in memory else torch.zeros_like(gradient)
        moment = torch.addcmul(before * old, gradient, gradient, value=1.0 - old)
        self._next[parameter] = moment, count
        self._refused = False
        root = (moment / (1.0 - old**count)).sqrt_()
        # Not in place: autograd may still need the gradient's memory.
        parameter.grad = gradient / root.mul_(self._noise).add_(group["eps"])


def _settled(group: dict[str, Any], own: dict[str, Any], weight_decay: float) -> dict[str, Any]:
    """A parameter group with all settings. SGD's own decay goes through momentum, which Adam's does not; so ours has
    another name."""
    settings = {**own, **group}
    decay = settings.pop("weight_decay", weight_decay)
    return {**settings, "momentum": settings["betas"][0], "weight_decay": 0.0, "decay": decay}
