"""Residual policies: what becomes of entries that a rank sent and that did not survive to the end.

A policy acts when the final support is known, on what a journal has noted of the step. `carry` needs none. `partial`
and `local` lose mass; they are for ablation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from spardl.memory.buffer import Buffer
    from spardl.sparse import SparseBlocks


@dataclass(frozen=True, slots=True)
class _Touched:
    """Positions that a program changed, and what they held before."""

    positions: "Tensor"
    before: "Tensor"
    taken: bool


class Journal:
    """Everything that programs take out of a buffer and add to it in one step. Costs memory in proportion to k."""

    def __init__(self) -> None:
        self._touched: list[_Touched] = []

    def took(self, positions: "Tensor", values: "Tensor") -> None:
        """Note that these values were moved out of the buffer."""
        self._touched.append(_Touched(positions, values, taken=True))

    def gave(self, positions: "Tensor", before: "Tensor") -> None:
        """Note that something was added at these positions, which held `before`."""
        self._touched.append(_Touched(positions, before, taken=False))

    def clear(self) -> None:
        """The step is over."""
        self._touched.clear()

    def undo_outside(self, buffer: "Buffer", settled: "Tensor") -> None:
        """Put back what these positions do not hold, the last change first."""
        from spardl.memory.algebra import among

        ascending = settled.sort().values
        for touched in reversed(self._touched):
            stays = among(touched.positions, ascending)
            buffer.values[touched.positions] = buffer.values[touched.positions].where(stays, touched.before)

    def changes(self, buffer: "Buffer") -> "tuple[Tensor, Tensor]":
        """Every position that was changed, in natural order, and by how much less it holds now than in the beginning; a
        position may occur several times. The buffer is of no use afterwards."""
        import torch

        if not self._touched:
            return torch.empty(0, dtype=torch.int64, device=buffer.device), torch.empty(0, device=buffer.device)
        positions = torch.cat([touched.positions for touched in self._touched])
        before = torch.cat([touched.before for touched in self._touched])
        layout = buffer.layout
        return buffer.kernels.changes(buffer.array, layout.starts, layout.chunk, positions, before)

    def own(self, otherwise: "Tensor") -> "Tensor":
        """The positions that this rank itself took, some of them several times; `otherwise`, if it took none."""
        import torch

        taken = [touched.positions for touched in self._touched if touched.taken]
        return torch.cat(taken) if taken else otherwise


class Carry:
    """What was dropped stays where it was dropped: in the memory of the rank that cut it."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal  # None, if nobody wants to know what a step changed

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        """Undo what the policy wants undone, now that the agreed sum is known."""

    def forget(self) -> None:
        """The step is over."""
        if self.journal is not None:
            self.journal.clear()


class Return(Carry):
    """What did not survive goes back to its owners: everything outside the support is undone.

    This is SparDL's global residual collection.
    """

    journal: Journal

    def __init__(self, journal: Journal | None = None) -> None:
        super().__init__(journal or Journal())

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        self.journal.undo_outside(buffer, buffer.positions(result))


class Local(Return):
    """A rank keeps its own values, but where it took them: what others cut is lost."""

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        support = buffer.positions(result)
        mine = self.journal.own(support[:0])
        self.journal.undo_outside(buffer, mine)
        buffer.values[mine] = 0


class Partial(Local):
    """A rank keeps its own values, but where it took them and the coordinate survived, as published for gTopk."""

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        from spardl.memory.algebra import among

        support = buffer.positions(result)
        mine = self.journal.own(support[:0])
        survived = among(mine, support.sort().values)
        self.journal.undo_outside(buffer, mine.where(survived, -1))
        buffer.values[mine] = buffer.values[mine].masked_fill(survived, 0)


POLICIES: dict[str, type[Carry]] = {"carry": Carry, "return": Return, "partial": Partial, "local": Local}
