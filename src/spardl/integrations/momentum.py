"""Momentum belongs before the selection: an SGD optimizer's momentum and weight decay, moved into the accumulator.

After sparse synchronisation, an entry that waited arrives without the momentum it would have built up, and training
lags. Applied to the local gradient, before it is accumulated, momentum accumulates with it (Lin et al., "Deep Gradient
Compression", ICLR 2018). The optimizer keeps the learning rate and shows its own settings wherever it is saved.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from spardl.accumulator import Momentum
from spardl.errors import ConfigError

# An object of its own, so that a zero which a user or a scheduler sets later can be told from ours.
_ZERO = float("0")
_NEUTRAL: dict[str, Any] = {"momentum": _ZERO, "nesterov": False, "weight_decay": _ZERO, "dampening": _ZERO}


@dataclass
class _Settings:
    """One parameter group's settings, as the user gave them."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0


class LocalMomentum:
    """Takes momentum, Nesterov, weight decay and dampening out of an optimizer's groups until `restore`.

    Only out of groups that hold parameters in `names`. Velocities go by these names, flat, in memory order.
    """

    @staticmethod
    def settings_of(optimizer: Optimizer | None) -> list[dict[str, Any]] | None:
        """What there is to move, by parameter group; None if nothing."""
        if not isinstance(optimizer, SGD):
            return None
        settings = [{name: group[name] for name in _NEUTRAL} for group in optimizer.param_groups]
        return settings if any(group["momentum"] or group["weight_decay"] for group in settings) else None

    def __init__(self, optimizer: Optimizer, names: Mapping[Parameter, str]) -> None:
        self.optimizer = optimizer
        self.started: set[str] = set()  # parameters with a velocity
        self._names = names
        self._prompt: float = getattr(optimizer, "prompt", 0.0)
        self._settings: list[_Settings | None] = []
        self._velocities: dict[str, Tensor] = {}
        chosen = [self._is_ours(index, group) for index, group in enumerate(optimizer.param_groups)]
        if not any(chosen):
            raise ConfigError("this optimizer steps no parameter of the model; pass the one that does, or False.")
        self.adopt()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.adopt()),
            optimizer.register_state_dict_post_hook(lambda _, state: self._show(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._reload()),
        ]

    def adopt(self) -> None:
        """Take over what a scheduler, a checkpoint or the user has set since the last step."""
        for index, group in enumerate(self.optimizer.param_groups):
            if index == len(self._settings):
                self._settings.append(_Settings() if self._is_ours(index, group) else None)
            settings = self._settings[index]
            if settings is None:
                continue
            for name, neutral in _NEUTRAL.items():
                if group[name] is not neutral:
                    setattr(settings, name, group[name])
                    group[name] = neutral
            for parameter in group["params"]:
                self._adopt_buffer(parameter, _sign(group))

    def of(self, parameters: Mapping[Parameter, str]) -> dict[str, Momentum]:
        """What to apply to each parameter's gradient now."""
        settings = {
            parameter: (settings, group)
            for settings, group in zip(self._settings, self.optimizer.param_groups, strict=True)
            for parameter in group["params"]
        }
        return {
            name: self._momentum(parameter, name, *settings.get(parameter, (None, {})))
            for parameter, name in parameters.items()
        }

    def take_velocities(self) -> dict[str, Tensor]:
        """Momentum that the optimizer had built up, or loaded, before it was handed over. Each is given out once."""
        taken, self._velocities = self._velocities, {}
        return taken

    def stepped_names(self) -> set[str]:
        """The parameters that this optimizer steps."""
        groups = [group["params"] for group, s in zip(self.optimizer.param_groups, self._settings, strict=True) if s]
        return {self._names[parameter] for group in groups for parameter in group if parameter in self._names}

    def restore(self, residuals: dict[str, Tensor], velocities: dict[str, Tensor]) -> None:
        """Give the optimizer its settings back, and velocities as its momentum buffers.

        Residuals hold updates that have been through momentum already, so they are applied here, once.
        """
        self.adopt()
        for hook in self._hooks:
            hook.remove()
        for settings, group in zip(self._settings, self.optimizer.param_groups, strict=True):
            if settings is None:
                continue
            group.update(asdict(settings))
            for parameter in group["params"]:
                name = self._names.get(parameter, "")
                if name in residuals:
                    update = unflatten(residuals[name], parameter)
                    parameter.data.add_(update, alpha=-_sign(group) * float(group["lr"]))
                if name in velocities and name in self.started:
                    buffer = unflatten(velocities[name], parameter).mul_(_sign(group))
                    self.optimizer.state[parameter]["momentum_buffer"] = buffer

    def _is_ours(self, index: int, group: dict[str, Any]) -> bool:
        ours = [parameter for parameter in group["params"] if parameter in self._names]
        others = len(group["params"]) - len(ours)
        if ours and others and (group["momentum"] or group["weight_decay"]):
            raise ConfigError(
                f"parameter group {index} of the optimizer has momentum or weight decay and holds {others} parameter(s)"
                " without a sparsely synchronised gradient (a sparse embedding, or of another model), which would lose"
                " it; put these into a parameter group of their own, or pass optimizer=False."
            )
        return bool(ours)

    def _adopt_buffer(self, parameter: Parameter, sign: float) -> None:
        buffer = self.optimizer.state.get(parameter, {}).pop("momentum_buffer", None)
        if buffer is not None and parameter in self._names:
            name = self._names[parameter]
            self._velocities[name] = flatten(buffer, parameter) * sign
            self.started.add(name)

    def _momentum(self, parameter: Parameter, name: str, settings: _Settings | None, group: dict[str, Any]) -> Momentum:
        weights = in_memory_order(parameter).float()
        decay = _sign(group) * settings.weight_decay if settings is not None else 0.0
        if settings is None or not settings.momentum:
            # In this form the plain gradient is added, and no velocity builds up that a later momentum would find.
            self.started.discard(name)
            return Momentum(weights, 0.0, decay, damping=0.0, nesterov=True, prompt=self._prompt)
        # Torch's first step is undamped, so ours is too.
        damping = 1.0 - settings.dampening if name in self.started else 1.0
        return Momentum(weights, settings.momentum, decay, damping, bool(settings.nesterov), self._prompt)

    def _show(self, state: dict[str, Any]) -> dict[str, Any]:
        """A saved optimizer looks as if it had never been touched, so that it resumes with and without spardl."""
        self.adopt()
        for settings, group in zip(self._settings, state["param_groups"], strict=True):
            if settings is not None:
                group.update(asdict(settings))
        return state

    def _reload(self) -> None:
        self._settings.clear()
        self.adopt()


def _sign(group: dict[str, Any]) -> float:
    """An optimizer that maximizes negates the gradient it is given: decay and velocities are seen from there."""
    return -1.0 if group.get("maximize") else 1.0


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in the order in which DDP puts them into a bucket.

    That is a flat view of the memory, whatever its strides (channels_last, transposed); of memory with gaps, a copy.
    """
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,)) if _is_gapless(tensor) else tensor.reshape(-1)


def flatten(tensor: Tensor, parameter: Parameter) -> Tensor:
    """`tensor`, of the parameter's shape but maybe other strides, as float32 in the parameter's memory order."""
    return in_memory_order(_empty_like(parameter, torch.float32).copy_(tensor))


def unflatten(flat: Tensor, parameter: Parameter) -> Tensor:
    """The other way: a tensor like the parameter."""
    tensor = _empty_like(parameter, parameter.dtype)
    in_memory_order(tensor).copy_(flat)
    return tensor


def _empty_like(parameter: Parameter, dtype: torch.dtype) -> Tensor:
    layout = torch.preserve_format if _is_gapless(parameter) else torch.contiguous_format
    return torch.empty_like(parameter, dtype=dtype, memory_format=layout, requires_grad=False)


def _is_gapless(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() in (0, span)
