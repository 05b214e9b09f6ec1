"""Replica: one parameter, or this rank's part of one, twice: as this rank steps it and as all ranks share it."""

import torch
from torch import Tensor
from torch.nn import Parameter

from spardl.integrations.optim.momentum import in_memory_order, is_gapless
from spardl.integrations.parts import part_of


class Replica:
    """Shared weights are float32 and flat, in memory order. Own weights are the parameter itself.

    A parameter of fewer bits, or one with gaps in its memory, has a float32 `master` of this rank's own: what its
    optimizer moves it by is added there, and the parameter shows it, rounded.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.master = None if _is_plain(parameter) else in_memory_order(parameter).float().clone()
        self.shared = self.own().clone()

    def begin(self) -> None:
        """What the parameter holds now is shared."""
        if self.master is not None:
            self.master.copy_(in_memory_order(self.parameter).float())
        self.shared.copy_(self.own())

    def load(self, shared: Tensor, own: Tensor) -> None:
        """Both, as they were saved."""
        self.shared.copy_(shared.reshape(-1), non_blocking=True)
        if self.master is not None:
            self.master.copy_(own.reshape(-1), non_blocking=True)
        self.put(own.reshape(-1))

    def own(self) -> Tensor:
        """This rank's weights, flat; what the optimizer has done since the last look is in them."""
        if self.master is None:
            return in_memory_order(self.parameter)
        shown = self.master.to(self.parameter.dtype).float()
        return self.master.add_(in_memory_order(self.parameter).float() - shown)

    def show(self) -> None:
        """Have the parameter show the master, if there is one."""
        if self.master is not None:
            self.put(self.master)

    def put(self, flat: Tensor) -> None:
        """Write these weights into the parameter."""
        if is_gapless(self.parameter):
            in_memory_order(self.parameter).copy_(flat, non_blocking=True)
        else:
            part = part_of(self.parameter.detach())
            part.copy_(flat.view(part.shape), non_blocking=True)

    def swap(self) -> None:
        """Exchange own and shared weights: what was shared is in the parameter now, and the other way round."""
        own = self.own()
        held = own.clone() if self.master is None else own
        self.put(self.shared)
        if self.master is None:
            self.shared.copy_(held)
        else:
            self.shared, self.master = held, self.shared

    @property
    def elements(self) -> int:
        return self.shared.numel()


def _is_plain(parameter: Parameter) -> bool:
    return parameter.dtype is torch.float32 and is_gapless(parameter)
