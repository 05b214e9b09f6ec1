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

from spardl.errors import ConfigError
from spardl.integrations.parts import part_of
from spardl.memory.velocity import Momentum

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
        settings = [{name: _plain(group[name]) for name in _NEUTRAL} for group in optimizer.param_groups]
        return settings if any(group["momentum"] or group["weight_decay"] for group in settings) else None

    def __init__(self, optimizer: Optimizer, names: Mapping[Parameter, str]) -> None:
        self.optimizer = optimizer
        self.reloaded = False  # whether the optimizer has loaded a state without momentum since it was last asked
        self._names = names
        self._fade_after: float = getattr(optimizer, "fade_after", 0.0)
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

    def rules(self) -> dict[str, Momentum]:
        """What to apply to each parameter's gradient now."""
        return {
            self._names[parameter]: self._rule(parameter, settings, group)
            for settings, group in zip(self._settings, self.optimizer.param_groups, strict=True)
            if settings is not None
            for parameter in group["params"]
            if parameter in self._names
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
                if name in velocities:
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
            self._velocities[self._names[parameter]] = flatten(buffer, parameter) * sign

    def _rule(self, parameter: Parameter, settings: _Settings, group: dict[str, Any]) -> Momentum:
        return Momentum(
            in_memory_order(parameter).float(),
            float(settings.momentum),
            _sign(group) * float(settings.weight_decay),
            float(settings.dampening),
            bool(settings.nesterov),
            self._fade_after,
        )

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
        self.reloaded = not self._velocities and any(each is not None and each.momentum for each in self._settings)


def plain_rule(parameter: Parameter) -> Momentum:
    """The rule of a parameter that no momentum acts on: its gradient as it is."""
    return Momentum(in_memory_order(parameter).float(), 0.0, 0.0)


def _plain(value: Any) -> Any:
    """A setting that may be a tensor, as a number."""
    return value.item() if isinstance(value, Tensor) else value


def _sign(group: dict[str, Any]) -> float:
    """An optimizer that maximizes negates the gradient it is given: decay and velocities are seen from there."""
    return -1.0 if group.get("maximize") else 1.0


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in the order in which DDP puts them into a bucket.

    That is a flat view of the memory, whatever its strides (channels_last, transposed); of memory with gaps, a copy. Of
    a DTensor, this rank's part.
    """
    tensor = part_of(tensor.detach())
    return tensor.as_strided((tensor.numel(),), (1,)) if is_gapless(tensor) else tensor.reshape(-1)


def flatten(tensor: Tensor, parameter: Parameter) -> Tensor:
    """`tensor`, of the parameter's shape but maybe other strides, as float32 in the parameter's memory order."""
    return in_memory_order(empty_like(parameter, torch.float32).copy_(tensor))


def unflatten(flat: Tensor, parameter: Parameter) -> Tensor:
    """A tensor like the parameter, from values in the parameter's memory order."""
    tensor = empty_like(parameter, parameter.dtype)
    in_memory_order(tensor).copy_(flat)
    return tensor


def empty_like(parameter: Parameter, dtype: torch.dtype) -> Tensor:
    """Room for values of another type, in memory that is ordered as the parameter's."""
    layout = torch.preserve_format if is_gapless(parameter) else torch.contiguous_format
    return torch.empty_like(parameter, dtype=dtype, memory_format=layout, requires_grad=False)


def is_gapless(tensor: Tensor) -> bool:
    """Whether the elements of a tensor, or of this rank's part of it, fill their memory, in whatever order."""
    tensor = part_of(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() in (0, span)
