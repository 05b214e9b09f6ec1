"""Momentum before the selection: each entry's velocity, kept where the entry waits.

A velocity that was sent with its entry starts anew, or fades (Lin et al., "Deep Gradient Compression", ICLR 2018).
Velocities are kept twice, so that a step that fails leaves them as they were.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import Flag
from spardl.memory.buffer import Buffer, zeros
from spardl.sparse import SparseBlocks


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum SGD of one parameter: what the optimizer would have done after synchronisation, done before it.

    weights     the parameter in memory order, for `decay`, which is weight decay as SGD has it
    dampening   as in torch, where a parameter's first step is not damped
    fade_after  an entry that was sent keeps its velocity if it waited for about so many steps or fewer, and the less of
                it the longer it waited; 0 leaves none. All parameters of a group have the same
    continued   the optimizer has not stepped since the last gradient: this one is added to it, in the same step of
                momentum, and decay does not come twice
    """

    weights: Tensor
    momentum: float
    decay: float
    dampening: float = 0.0
    nesterov: bool = False
    fade_after: float = 0.0
    continued: bool = False


class Velocity:
    """The velocities of one group, in the order of its buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.started: set[str] = set()  # parameters that have one
        self.values = zeros(buffer.layout.length, buffer.device)
        self._updated = zeros(buffer.layout.length, buffer.device)
        self._buffer = buffer
        self._damping: dict[str, float] = {}  # of each parameter's present step of momentum
        self._fade_after = 0.0

    def add(
        self,
        name: str,
        offset: int,
        gradient: Tensor,
        scale: float,
        rule: Momentum,
        wanted: NDArray[np.bool_],
    ) -> Flag:
        """Add what `rule` makes of `scale * gradient` to the buffer, in the wanted blocks. Whether sums are finite.

        As `kernels.accumulate`, it leaves what the buffer held before in the gradient's memory.
        """
        self._fade_after = rule.fade_after
        layout, kernels = self._buffer.layout, self._buffer.kernels
        if rule.continued:
            return self._continue(name, offset, gradient, scale, rule)
        return kernels.accumulate_momentum(
            self._buffer.array,
            self.values,
            self._updated,
            layout.starts,
            layout.chunk,
            offset,
            gradient,
            rule.weights,
            scale,
            rule.momentum,
            rule.decay,
            self._damping[name],
            rule.nesterov or not rule.momentum,
            wanted,
            self._buffer.listing.shortlist,
        )

    def begin(self, name: str, rule: Momentum) -> None:
        """A parameter's next step of momentum. Torch's first one is undamped, and so is this.

        Without momentum the plain gradient is added, and no velocity builds up that a later momentum would find.
        """
        if not rule.continued:
            undamped = name not in self.started
            self._damping[name] = (1.0 if undamped else 1.0 - rule.dampening) if rule.momentum else 0.0

    def _continue(self, name: str, offset: int, gradient: Tensor, scale: float, rule: Momentum) -> Flag:
        """Add more of the last step's gradient, in all blocks: velocities and sums become as if it had come then."""
        layout, kernels = self._buffer.layout, self._buffer.kernels
        damping = self._damping.get(name, 1.0)
        everywhere = np.ones(layout.count, np.bool_)
        place = (layout.starts, layout.chunk, offset)
        self.keep(offset, torch.empty_like(gradient))
        kernels.accumulate(self._updated, *place, gradient.clone(), scale * damping, everywhere)
        share = 1.0 + rule.momentum * damping if rule.nesterov or not rule.momentum else damping
        self._buffer.listing.give_up()
        return kernels.accumulate(self._buffer.values, *place, gradient, scale * share, everywhere)

    def keep(self, offset: int, scratch: Tensor) -> None:
        """This step leaves the stretch at `offset`, as long as `scratch`, as it is."""
        self._buffer.read(offset, scratch, self.values)
        self._buffer.write(offset, scratch, self._updated)

    def fade(self, taken: SparseBlocks) -> None:
        """Let the velocities of entries that have been sent fade: to zero, or less where they were sent promptly."""
        firsts = self._buffer.starts[taken.ids]
        kernels = self._buffer.kernels
        kernels.fade(self._updated, firsts, taken.counts, taken.places, taken.amounts, self._fade_after)

    def commit(self, rules: dict[str, Momentum]) -> None:
        """Make the velocities of this step those in force, for the parameters that took part in it."""
        self.values, self._updated = self._updated, self.values
        self.started |= {name for name, rule in rules.items() if rule.momentum}
        self.started -= {name for name, rule in rules.items() if not rule.momentum}
