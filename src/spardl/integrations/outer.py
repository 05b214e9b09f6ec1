"""Outer optimizers: how the shared weights follow what ranks have agreed on."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from spardl.errors import StateError
from spardl.integrations.inertia import restarts
from spardl.kernels import Kernels
from spardl.sync.landing import Landing
from spardl.update import LocalUpdates


class Outer:
    """Plain steps, signs, or momentum with a velocity per parameter, which is the same on all ranks.

    A plain step touches the agreed entries alone. Momentum moves every weight at every exchange: one more float32 copy,
    and a pass over it. `rates` are the factors of the agreed mean in the last exchange that began: of tensors of which
    some entries were sent, and of those that were sent whole.
    """

    def __init__(self, rule: LocalUpdates, kernels: Kernels, optimizers: Sequence[Optimizer]) -> None:
        self.rates = (1.0, 1.0)
        self.kernels = kernels
        self._rule = rule
        self.velocities: dict[str, Tensor] = {}
        self._momentum = float(rule.outer_momentum) if rule.outer in ("momentum", "nesterov") else 0.0
        self._nesterov = rule.outer == "nesterov"
        self._signs = rule.outer == "sign"
        self._optimizers = optimizers

    def expect(self, density: float, workers: int) -> None:
        """What lands next comes from an exchange of this share of entries among so many, on all of them alike."""
        bold = all(_holds_back(self._rule, each) for each in self._optimizers)
        rate, whole = (self._rule.rate(workers, share, bold=bold) for share in (density, 1.0))
        self.rates = (rate, whole)

    @property
    def everywhere(self) -> bool:
        """Whether steps are given for every weight, and not for the agreed entries alone."""
        return self._momentum > 0

    def step(self, name: str, landing: Landing) -> Tensor:
        """What to take off the shared weights of this name."""
        if self._signs:
            return torch.sign(landing.agreed) * float(self._optimizers[0].param_groups[0]["lr"])
        rate = self.rates[landing.support is None]
        if not self.everywhere:
            return landing.agreed * rate
        where = slice(None) if landing.support is None else landing.support
        velocity = self.velocities[name].mul_(self._momentum)
        velocity[where] += landing.agreed
        if not self._nesterov:
            return velocity * rate
        step = velocity * self._momentum
        step[where] += landing.agreed
        return step.mul_(rate)

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """These are the shared weights; velocities begin at zero."""
        if self.everywhere:
            self.velocities = {name: torch.zeros_like(each) for name, each in weights.items()}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Raise `StateError` if these, whose sizes are right, are not velocities of this rule."""
        if set(saved) != set(self.velocities):
            raise StateError("this state has outer momentum where there is none here, or none; attach as it was saved.")

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """What `velocities` was when a state was saved, and was checked."""
        for name, velocity in self.velocities.items():
            velocity.copy_(saved[name].reshape(-1), non_blocking=True)


def _holds_back(rule: LocalUpdates, optimizer: Optimizer) -> bool:
    """Whether a long step of the shared weights is not followed by longer ones: Adam divides by what gradients were,
    and SGD loses the momentum of what was sent."""
    if not isinstance(optimizer, SGD):
        return True
    return restarts(rule, optimizer) and all(group["momentum"] for group in optimizer.param_groups)
