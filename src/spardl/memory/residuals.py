"""Residual policies: what becomes of entries that a rank sent and that did not survive to the end.

A policy hears of everything that a program takes and adds, and acts when the final support is known. Only `carry` needs
no journal, which costs memory in proportion to k. `partial` and `local` lose mass; they are for ablation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from spardl.memory.buffer import Buffer
    from spardl.sparse import SparseBlocks


class Policy(Protocol):
    """What one group does about entries that did not survive."""

    journals: ClassVar[bool]  # whether it wants to hear of what is taken and added

    def took(self, positions: "Tensor", values: "Tensor") -> None:
        """Hear that these values were moved out of the buffer."""
        ...

    def gave(self, positions: "Tensor", before: "Tensor") -> None:
        """Hear that something was added at these positions, which held `before`."""
        ...

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        """Undo what the policy wants undone, now that the agreed sum is known."""
        ...

    def forget(self) -> None:
        """Forget the step, which failed."""
        ...


class Carry:
    """What was dropped stays where it was dropped: in the memory of the rank that cut it."""

    journals: ClassVar[bool] = False

    def took(self, positions: "Tensor", values: "Tensor") -> None:
        pass

    def gave(self, positions: "Tensor", before: "Tensor") -> None:
        pass

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        pass

    def forget(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Touched:
    """Positions that a program changed, and what they held before."""

    positions: "Tensor"
    before: "Tensor"
    taken: bool


class Return:
    """What did not survive goes back to its owners: everything outside the support is undone.

    This is SparDL's global residual collection.
    """

    journals: ClassVar[bool] = True

    def __init__(self) -> None:
        self._journal: list[_Touched] = []

    def took(self, positions: "Tensor", values: "Tensor") -> None:
        self._journal.append(_Touched(positions, values, taken=True))

    def gave(self, positions: "Tensor", before: "Tensor") -> None:
        self._journal.append(_Touched(positions, before, taken=False))

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        self._undo_outside(buffer, buffer.positions(result))
        self.forget()

    def forget(self) -> None:
        self._journal.clear()

    def _undo_outside(self, buffer: "Buffer", settled: "Tensor") -> None:
        import torch

        for touched in reversed(self._journal):
            undone = ~torch.isin(touched.positions, settled)
            buffer.values[touched.positions[undone]] = touched.before[undone]

    def _own(self, settled: "Tensor") -> "Tensor":
        """The positions that this rank itself took."""
        import torch

        taken = [touched.positions for touched in self._journal if touched.taken]
        return torch.cat(taken).unique() if taken else settled[:0]


class Local(Return):
    """A rank keeps its own values, but where it took them: what others cut is lost."""

    def settle(self, buffer: "Buffer", result: "SparseBlocks") -> None:
        settled = self._cleared(buffer.positions(result))
        self._undo_outside(buffer, settled)
        buffer.values[settled] = 0
        self.forget()

    def _cleared(self, support: "Tensor") -> "Tensor":
        return self._own(support)


class Partial(Local):
    """A rank keeps its own values, but where it took them and the coordinate survived, as published for gTopk."""

    def _cleared(self, support: "Tensor") -> "Tensor":
        import torch

        mine = self._own(support)
        return mine[torch.isin(mine, support)]


POLICIES: dict[str, type[Policy]] = {"carry": Carry, "return": Return, "partial": Partial, "local": Local}
