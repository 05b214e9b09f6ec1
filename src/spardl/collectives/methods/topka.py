"""TopkA: every worker's largest entries, gathered by all and summed.

The plain way, as in Renggli et al., "SparCML", SC 2019, and Lin et al., "Deep Gradient Compression", ICLR 2018. The
support grows with every worker: the result has up to k P entries. TopkA2 cuts it to k afterwards: the model changes in
as few places as with the other methods, at TopkA's traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from spardl.collectives.bruck import gather_blocks
from spardl.collectives.method import About, Seat, Stateless
from spardl.collectives.price import Price
from spardl.collectives.program import Program
from spardl.memory.layout import BlockLayout, entries

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks


class TopkA(Stateless):
    """ceil(log2 P) rounds; each worker sends k (P - 1) entries. Loses nothing: what is selected is applied."""

    about: ClassVar[About] = About("Renggli et al., SC 2019", Price("ceil(log2(P))"), Price("k*(P-1)"))

    def __init__(self, seat: Seat) -> None:
        self.team = seat.team
        self.layout = BlockLayout.contiguous(seat.length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        budgets = np.full(self.team.size, entries(density, self.layout.length))
        mine = memory.frames.code(memory.take_largest(np.array([0]), budgets[:1]))
        pieces = yield from gather_blocks(self.team, memory.frames, mine, np.zeros_like(budgets), budgets, full=True)
        versions = [piece.decode() for piece in pieces]
        return self._agree(memory, versions, memory.algebra.sum(versions), int(budgets[0]))

    def _agree(self, memory: Memory, versions: list[SparseBlocks], total: SparseBlocks, k: int) -> SparseBlocks:
        """What is applied, of all that was gathered: everything."""
        return total


class TopkA2(TopkA):
    """TopkA, cut to the k largest of the sum. Each worker takes back what it gave of the others: nothing is lost."""

    def _agree(self, memory: Memory, versions: list[SparseBlocks], total: SparseBlocks, k: int) -> SparseBlocks:
        kept, _ = memory.algebra.cut(total, k)
        memory.give_back(memory.algebra.zeroed_at(versions[self.team.position], kept))
        return kept
