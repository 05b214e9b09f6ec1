"""gTopk: a binomial tree that adds two sparse vectors at each node and passes on the k largest, then broadcasts.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019. Published for powers of two; here for any number of workers.

An entry that is cut in one subtree but survives in another is lost in the published algorithm, which takes back only
own entries that are absent from the result: that is residuals="partial". With "carry" (our default) the node that
cuts an entry keeps it, with "return" it goes back to its owners, and nothing is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from spardl.collectives.method import About, Seat, Stateless
from spardl.collectives.price import Price
from spardl.collectives.program import Message, Program, Round
from spardl.memory.layout import BlockLayout, entries

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks


class GTopk(Stateless):
    """2 ceil(log2 P) rounds on the longest path; the root sends most, k ceil(log2 P) entries."""

    about: ClassVar[About] = About(
        "Shi et al., ICDCS 2019", Price("2*ceil(log2(P))"), Price("k*ceil(log2(P))"), note="of the root"
    )

    def __init__(self, seat: Seat) -> None:
        self.rank, self.workers = seat.rank, seat.workers
        self.layout = BlockLayout.contiguous(seat.length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        ids, budgets = np.array([0]), np.array([entries(density, self.layout.length)])
        frames, algebra = memory.frames, memory.algebra
        capacity = frames.capacity(ids, budgets)
        held = memory.take_largest(ids, budgets)
        children = []
        gap = 1
        while gap < self.workers and self.rank % (2 * gap) == 0:
            child = self.rank + gap
            if child < self.workers:
                (frame,) = yield Round([], [(child, capacity)], "gtopk reduce")
                theirs = frames.unpack(frame, ids, budgets, child, full=True).decode()
                held, dropped = algebra.cut(algebra.merge(held, theirs), int(budgets[0]))
                memory.give_back(dropped)
                children.append(child)
            gap *= 2
        coded = frames.code(held)
        if self.rank:
            parent = self.rank - gap
            yield Round([Message(parent, frames.pack(coded, budgets), capacity)], [], "gtopk reduce")
            (frame,) = yield Round([], [(parent, capacity)], "gtopk broadcast")
            coded = frames.unpack(frame, ids, budgets, parent, full=True)
        for child in reversed(children):
            yield Round([Message(child, frames.pack(coded, budgets), capacity)], [], "gtopk broadcast")
        return coded.decode()
