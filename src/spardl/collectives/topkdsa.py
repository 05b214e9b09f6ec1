"""TopkDSA: each worker's largest entries go straight to the owners of their regions, which sum and share them.

The split-and-gather of Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019.
SparCML switches a region to dense form when its sparse form would be larger. Here that comes by itself: gap coding of a
crowded region degenerates to one bit per element, so sparse form never takes more than dense form plus that bit.
"""

from typing import Any, ClassVar

import numpy as np

from spardl.blocks import entries
from spardl.collectives.all_gather import bruck_all_gather
from spardl.collectives.memory import Memory
from spardl.collectives.method import About, Place, block_layout
from spardl.collectives.owners import send_to_owners
from spardl.collectives.program import Program
from spardl.sparse import SparseBlocks
from spardl.wire.frame import CodedBlocks


class TopkDSA:
    """1 + ceil(log2 P) rounds; between 2k (P-1)/P and k (P-1)/P + k (P-1) entries, as supports overlap or not."""

    about: ClassVar[About] = About(
        "Renggli et al., SC 2019", "1 (of P-1 messages) + ceil(log2 P)", "2k (P-1)/P to k (P-1)/P + k (P-1)"
    )

    def __init__(self, place: Place) -> None:
        self.team = place.team
        self.layout = block_layout(place, place.workers)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        k, lengths = entries(density, self.layout.length), self.layout.lengths
        mine = memory.code(memory.take_largest_of_all(k))
        versions = yield from send_to_owners(self.team, memory, mine, np.minimum(k, lengths))
        total = memory.code(memory.sum(versions))
        limits = np.minimum(k * self.team.size, lengths)
        blocks = yield from bruck_all_gather(self.team, memory, total, np.arange(self.team.size), limits)
        return CodedBlocks.join(blocks).decode()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
