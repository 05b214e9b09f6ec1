"""Adam before the selection: each worker divides its own gradient by the root of its second moment, then accumulates.

Behind the selection Adam goes wrong twice. Entries are chosen by the size of their gradient, which Adam is there to
level out. And an entry that waited a hundred steps arrives as one large value, which Adam takes for a noisy one: it
moves the weight by about ten steps' worth, not a hundred. Divided first, what waits adds up in units of the update, and
arrives whole. What remains is SGD with momentum, which `attach` moves before the selection as it does any other's.

Kingma and Ba, "Adam", ICLR 2015; with `decoupled` decay Loshchilov and Hutter, "AdamW", ICLR 2019.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from spardl.errors import ConfigError


class LocalAdam(SGD):
    """Adam for a model that `attach` synchronises sparsely; pass it there. Not for use with a GradScaler.

    Each worker knows only its own second moment. Where gradients are mostly noise, the mean over workers has a variance
    that is smaller by their number, so the root is divided by the root of that: steps are as long as Adam's own there.

    A step that is skipped leaves moments as they were. They are each worker's own, and so is `state_dict()`.
    """

    # Entries that are sent after a few steps keep their velocity: training loss is then closer to dense than with none
    # (docs/convergence.md). Under plain SGD it was harmful. See `Momentum.prompt`.
    prompt = 5.0

    def __init__(
        self,
        model: DistributedDataParallel,
        groups: list[dict[str, Any]] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        """`groups` may have a `weight_decay` of their own; without any, all parameters are one."""
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(f"LocalAdam needs the DistributedDataParallel model, not a {type(model).__name__}.")
        given = groups or [{"params": [each for each in model.parameters() if each.requires_grad]}]
        # SGD's own decay goes through momentum, which Adam's does not; so ours has another name.
        settings = {"betas": betas, "eps": eps, "decoupled": decoupled, "weight_decay": 0.0}
        own = [{**each, **settings, "decay": each.get("weight_decay", weight_decay)} for each in given]
        # After an undamped first step this is the mean over time that Adam's bias correction amounts to.
        super().__init__(own, lr=lr, momentum=betas[0], dampening=betas[0])
        self._model = model
        self._noise = dist.get_world_size(model.process_group) ** -0.5
        self._next: dict[Tensor, tuple[Tensor, int]] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._hook(index))

    def step(self, closure: Any = None) -> Any:
        """Apply what was averaged, and keep the second moments that it was divided by."""
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
        if gradient is None or not self._model.require_backward_grad_sync:
            return
        if gradient.layout is not torch.strided:
            raise ConfigError("LocalAdam takes dense gradients; build the embedding with sparse=False.")
        if group["decay"] and not group["decoupled"]:
            gradient = gradient.add(parameter, alpha=group["decay"])
        memory, old = self.state.get(parameter, {}), group["betas"][1]
        count = memory.get("step", 0) + 1
        before = memory["exp_avg_sq"] if "exp_avg_sq" in memory else torch.zeros_like(gradient)
        moment = torch.addcmul(before * old, gradient, gradient, value=1.0 - old)
        self._next[parameter] = moment, count
        root = (moment / (1.0 - old**count)).sqrt_()
        # Not in place: autograd may still need the gradient's memory.
        parameter.grad = gradient / root.mul_(self._noise).add_(group["eps"])
