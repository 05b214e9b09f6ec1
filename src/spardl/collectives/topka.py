"""TopkA: every worker's largest entries, gathered by all and summed.

The plain way, as in Renggli et al., "SparCML", SC 2019, and Lin et al., "Deep Gradient Compression", ICLR 2018. The
support grows with every worker: the result has up to k P entries. TopkA2 cuts it to k afterwards: the model changes in
as few places as with the other methods, at TopkA's traffic.
"""

from typing import Any, ClassVar

import numpy as np
import torch

from spardl.blocks import BlockLayout, entries
from spardl.collectives.all_gather import bruck_all_gather
from spardl.collectives.memory import Memory
from spardl.collectives.method import About, Place
from spardl.collectives.program import Program
from spardl.sparse import SparseBlocks


class TopkA:
    """ceil(log2 P) rounds; each worker sends k (P - 1) entries. Loses nothing: what is selected is applied."""

    about: ClassVar[About] = About("Renggli et al., SC 2019", "ceil(log2 P)", "k (P-1)")

    def __init__(self, place: Place) -> None:
        self.team = place.team
        self.layout = BlockLayout.contiguous(place.length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        budgets = np.full(self.team.size, entries(density, self.layout.length))
        mine = memory.code(memory.take_largest(np.array([0]), budgets[:1]))
        pieces = yield from bruck_all_gather(self.team, memory, mine, np.zeros_like(budgets), budgets)
        versions = [piece.decode() for piece in pieces]
        return self._agree(memory, versions, memory.sum(versions), int(budgets[0]))

    def _agree(self, memory: Memory, versions: list[SparseBlocks], total: SparseBlocks, k: int) -> SparseBlocks:
        """What is applied, of all that was gathered: everything."""
        return total

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class TopkA2(TopkA):
    """As TopkA, then the k largest of the sum. Each worker takes back what it gave of the others: nothing is lost."""

    def _agree(self, memory: Memory, versions: list[SparseBlocks], total: SparseBlocks, k: int) -> SparseBlocks:
        kept, _ = memory.cut(total, k)
        mine = versions[self.team.position]
        _, dropped = memory.part(mine, torch.isin(mine.indices, kept.indices))
        memory.give_back(dropped)
        return kept
