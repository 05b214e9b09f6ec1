"""TopkDSA: each worker's largest entries go straight to the owners of their regions, which sum and share them.

The split-and-gather of Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019.
SparCML switches a region to dense form when its sparse form would be larger. Here that comes by itself: gap coding of a
crowded region degenerates to one bit per element, so sparse form never takes more than dense form plus that bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from spardl.collectives.bruck import gather_joined
from spardl.collectives.method import About, BlockOptions, NoOptions, Seat, Stateless
from spardl.collectives.numbers import all_gather_numbers, row
from spardl.collectives.owners import send_to_owners, sort_for_owners
from spardl.collectives.price import Price
from spardl.collectives.program import Program
from spardl.memory.layout import entries

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks


class TopkDSA(Stateless):
    """1 + ceil(log2 P) rounds; between 2k (P-1)/P and k (P-1)/P + k (P-1) entries, as supports overlap or not."""

    about: ClassVar[About] = About(
        "Renggli et al., SC 2019",
        rounds=Price("1 + ceil(log2(P))"),
        entries=Price("2*k*(P-1)/P", "k*(P-1)/P + k*(P-1)"),
        note="the first round has P-1 messages; entries as supports overlap or not",
    )
    Options: ClassVar[type[NoOptions]] = BlockOptions

    def __init__(self, seat: Seat) -> None:
        assert isinstance(seat.options, BlockOptions)
        self.team = seat.team
        self.layout = seat.options.layout(seat.length, seat.workers)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        k, lengths = entries(density, self.layout.length), self.layout.lengths
        taken = memory.take_largest_of_all(k)
        mine, counts = yield from sort_for_owners(self.team, memory, taken, np.minimum(k, lengths))
        versions = yield from send_to_owners(self.team, memory.frames, mine, counts, full=True)
        found = memory.algebra.without_zeros(memory.algebra.sum(versions))
        limits = np.minimum(k * self.team.size, lengths)
        if memory.fills:  # the host has to know how many each owner has; everywhere else frames say it
            limits = np.clip((yield from all_gather_numbers(self.team, row(found.count), "counts"))[:, 0], 0, limits)
        total = memory.frames.code(found.entries(int(limits[self.team.position])))
        everyone = np.arange(self.team.size)
        return (yield from gather_joined(self.team, memory.frames, total, everyone, limits, full=True)).decode()
