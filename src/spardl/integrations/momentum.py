"""Momentum belongs before the selection: an SGD optimizer's momentum and weight decay, moved into the accumulator.

After sparse synchronisation, an entry that waited arrives without the momentum it would have built up, and training
lags. Applied to the local gradient, before it is accumulated, momentum accumulates with it (Lin et al., "Deep Gradient
Compression", ICLR 2018). The optimizer keeps the learning rate and shows its own settings wherever it is saved.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from spardl.accumulator import Momentum

_FIELDS = ("momentum", "nesterov", "weight_decay", "dampening")
_NEUTRAL: dict[str, Any] = {"momentum": 0, "nesterov": False, "weight_decay": 0, "dampening": 0}


@dataclass
class _Settings:
    """One parameter group's settings, as the user gave them."""

    momentum: float
    nesterov: bool
    weight_decay: float
    dampening: float


class LocalMomentum:
    """Takes momentum, Nesterov, weight decay and dampening out of an optimizer's groups until `restore`."""

    @staticmethod
    def applies_to(optimizer: Optimizer) -> bool:
        """Whether there is anything to move."""
        return isinstance(optimizer, SGD) and any(g["momentum"] or g["weight_decay"] for g in optimizer.param_groups)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.started = False
        self.settings: list[_Settings] = []
        self._hooks: list[Any] = []
        self._take_over()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.adopt()),
            optimizer.register_state_dict_post_hook(lambda _, state: self._show(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._take_over()),
        ]

    def adopt(self) -> None:
        """Take over what a scheduler or the user has set since the last step; the rest stays as it was."""
        for settings, group in zip(self.settings, self.optimizer.param_groups, strict=True):
            for name in _FIELDS:
                if group[name]:
                    setattr(settings, name, group[name])
                    group[name] = _NEUTRAL[name]

    def of(self, parameters: list[Parameter]) -> dict[Parameter, Momentum]:
        """What to apply to each parameter's gradient now. Torch's first step is undamped, so ours is too."""
        settings = {
            parameter: (settings, group)
            for settings, group in zip(self.settings, self.optimizer.param_groups, strict=True)
            for parameter in group["params"]
        }
        return {parameter: self._momentum(parameter, *settings.get(parameter, (None, {}))) for parameter in parameters}

    def _momentum(self, parameter: Parameter, settings: _Settings | None, group: dict[str, Any]) -> Momentum:
        weights = in_memory_order(parameter).float()
        if settings is None:
            return Momentum(weights, 0.0, 0.0, 1.0, False)
        damping = 1.0 - settings.dampening if self.started else 1.0
        # The optimizer negates what it is given to maximize, so decay has to pull the other way.
        decay = -settings.weight_decay if group.get("maximize") else settings.weight_decay
        return Momentum(weights, settings.momentum, decay, damping, settings.nesterov)

    def buffers(self) -> dict[Parameter, Tensor]:
        """Momentum that the optimizer has built up before it was handed over, in memory order."""
        state = self.optimizer.state
        found = {p: state[p].get("momentum_buffer") for p in state if isinstance(p, Parameter)}
        return {p: in_memory_order(buffer).float().clone() for p, buffer in found.items() if buffer is not None}

    def restore(self, velocities: dict[Parameter, Tensor]) -> None:
        """Give the optimizer its settings back, and velocities (in memory order) as its momentum buffers."""
        for hook in self._hooks:
            hook.remove()
        for settings, group in zip(self.settings, self.optimizer.param_groups, strict=True):
            group.update(asdict(settings))
        for parameter, velocity in velocities.items():
            buffer = torch.empty_like(parameter)
            in_memory_order(buffer).copy_(velocity)
            self.optimizer.state[parameter]["momentum_buffer"] = buffer

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started, "settings": [asdict(settings) for settings in self.settings]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started = bool(state["started"])
        self.settings = [_Settings(**settings) for settings in state["settings"]]

    def _take_over(self) -> None:
        self.settings = [_Settings(**{name: group[name] for name in _FIELDS}) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.update(_NEUTRAL)

    def _show(self, state: dict[str, Any]) -> dict[str, Any]:
        """A saved optimizer looks as if it had never been touched, so that it resumes with and without spardl."""
        for settings, group in zip(self.settings, state["param_groups"], strict=True):
            group.update(asdict(settings))
        return state


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor in the order of its memory, whatever its strides (channels_last, transposed)."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
