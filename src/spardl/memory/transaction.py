"""One step of a group's memory: gradients are lent to it, and it is committed or rolled back as a whole.

Accumulating swaps: the gradient's own memory receives the old residual while the buffer receives the sum. The gradient
is about to be overwritten anyway, so the backup is free. `rollback` copies it back when the step fails anywhere (a
non-finite gradient on any rank, a dead peer); `commit` forgets it.

Adding waits: a block is added up when it is first touched, or when `add_up` says that there is time, because messages
are under way.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spardl.host import Flag
from spardl.kernels.api import Bools
from spardl.kernels.cpu.crew import Crew
from spardl.memory.buffer import Buffer
from spardl.memory.health import Health
from spardl.memory.velocity import Momentum, Velocity
from spardl.sparse import Ints


@dataclass(frozen=True, slots=True)
class _Lent:
    """A stretch of this step: its gradient, and once a block has been added up the residual from before, there."""

    name: str
    offset: int
    memory: Tensor
    scale: float = 1.0
    momentum: Momentum | None = None
    held: bool = False


class Transaction:
    """The open step of a buffer and, where momentum acts before the selection, of its velocities."""

    def __init__(self, buffer: Buffer, velocity: Velocity | None = None, crew: Crew | None = None) -> None:
        self.buffer = buffer
        self.velocity = velocity
        self.health = Health()
        self._crew = crew or Crew()
        self._lent: list[_Lent] = []
        self._later: list[_Lent] = []  # what is to be added in the blocks that wait
        self._begun = False
        self._waiting = np.zeros(buffer.layout.count, np.bool_)

    def lend(
        self, name: str, offset: int, gradient: Tensor, scale: float = 1.0, momentum: Momentum | None = None
    ) -> None:
        """Add `scale * gradient` (float32, flat) at a natural offset, block by block as they are touched.

        Until commit or rollback the gradient's memory belongs to the step.
        """
        if not self._waiting.all():
            self.add_up()
        self._open(offset, gradient)
        lent = _Lent(name, offset, gradient, scale, momentum)
        self._lent.append(lent)
        if momentum is not None and self.velocity is not None:
            self.velocity.begin(name, momentum)
            if momentum.continued:
                self.health.note(self._add(lent, np.ones_like(self._waiting)))
                return
        self._later.append(lent)
        self._waiting[:] = True

    def hold(self, name: str, offset: int, scratch: Tensor) -> None:
        """Keep this stretch out of the step: it counts as zero, and commit adds its residual back."""
        self.add_up()
        self._open(offset, scratch)
        self._lent.append(_Lent(name, offset, scratch, held=True))
        if self.velocity is not None:
            self.velocity.keep(offset, scratch)
        self.buffer.read(offset, scratch)
        self.buffer.write(offset, torch.zeros_like(scratch))

    def differ(self, offset: int, shared: Tensor, own: Tensor) -> None:
        """Set the stretch at a natural offset to `shared - own` (float32, flat), whatever it held.

        Nothing is lent: both stay as they are, and a rollback has nothing to undo.
        """
        self._open(offset, own)
        buffer, layout = self.buffer, self.buffer.layout

        def job(wanted: Bools) -> bool:
            place = (layout.starts, layout.chunk, offset)
            return self.health.note(
                buffer.kernels.differ(buffer.array, *place, shared, own, wanted, buffer.listing.shortlist)
            )

        self.health.note(self._crew.share(job, np.ones_like(self._waiting)))

    def _open(self, offset: int, stretch: Tensor) -> None:
        if not self._begun:
            self._begun = True
            self.buffer.listing.begin()
        self.buffer.listing.note_sum(offset, stretch.numel())

    @property
    def waits(self) -> bool:
        """Whether any block is yet to be added up."""
        return bool(self._later)

    def add_up(self, ids: Ints | None = None) -> None:
        """Add what has waited, in these blocks (default: all). A sum that is not finite poisons the step."""
        if not self._later:
            return
        wanted = self._waiting.copy()
        if ids is not None and self.buffer.starts is self.buffer.layout.starts:
            wanted[:] = False
            wanted[ids] = self._waiting[ids]
        if wanted.any():
            self.health.note(self._crew.share(self._add_waiting, wanted))
            self._waiting ^= wanted
            if not self._waiting.any():
                self._later.clear()

    def _add_waiting(self, wanted: Bools) -> bool:
        fine = True
        for lent in self._later:
            fine &= self.health.note(self._add(lent, wanted))
        return fine

    def _add(self, lent: _Lent, wanted: Bools) -> Flag:
        buffer = self.buffer
        if self.velocity is not None:
            assert lent.momentum is not None
            return self.velocity.add(lent.name, lent.offset, lent.memory, lent.scale, lent.momentum, wanted)
        layout, listed = buffer.layout, buffer.listing.shortlist
        return buffer.kernels.accumulate(
            buffer.array, layout.starts, layout.chunk, lent.offset, lent.memory, lent.scale, wanted, listed
        )

    def commit(self, *, dense: bool = False) -> None:
        """End the step. After a dense one the sums are handed out in the gradients' memory and leave the buffer."""
        self.add_up()
        if dense:
            self._hand_out()
        else:
            for lent in self._lent:
                if lent.held:
                    self._take_back(lent)
        if self.velocity is not None:
            self.velocity.commit({lent.name: lent.momentum for lent in self._lent if lent.momentum is not None})
        self._end()

    def _hand_out(self) -> None:
        """Move the sums to the gradients' memory, and what was held back to where it was."""
        whole = sum(lent.memory.numel() for lent in self._lent) == self.buffer.layout.length
        kept = []
        for lent in self._lent:
            if lent.held or not whole:
                kept.append((lent.offset, lent.memory.clone() if lent.held else torch.zeros_like(lent.memory)))
            self.buffer.read(lent.offset, lent.memory)
        if whole:  # which is the usual case, and one pass
            self.buffer.values.zero_()
        for offset, residual in kept:
            self.buffer.write(offset, residual)

    def _take_back(self, lent: _Lent) -> None:
        """Add the residual that was held back to what the step has left in its place."""
        layout = self.buffer.layout
        everywhere = np.ones_like(self._waiting)
        place = (layout.starts, layout.chunk, lent.offset)
        self.buffer.kernels.accumulate(self.buffer.values, *place, lent.memory, 1.0, everywhere)

    def rollback(self) -> None:
        """End the step as if it had never begun: residual and velocity are what they were, bit for bit."""
        self.add_up()
        for lent in reversed(self._lent):
            self.buffer.write(lent.offset, lent.memory)
        self._end()

    def _end(self) -> None:
        self._lent.clear()
        self._begun = False
        self.health.reset()
        self.buffer.listing.end()
