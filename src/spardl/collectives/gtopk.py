"""gTopk: a binomial tree that adds two sparse vectors at each node and passes on the k largest, then broadcasts.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019. Published for powers of two; here for any number of workers.

An entry that is cut in one subtree but survives in another is lost in the published algorithm, which takes back only
own entries that are absent from the result: that is residuals="partial". With "carry" (our default) the node that
cuts an entry keeps it, with "return" it goes back to its owners, and nothing is lost.
"""

from typing import Any, ClassVar

import numpy as np

from spardl.blocks import BlockLayout, entries
from spardl.collectives.memory import Memory
from spardl.collectives.method import About, Place
from spardl.collectives.program import Program, Round
from spardl.sparse import SparseBlocks


class GTopk:
    """2 ceil(log2 P) rounds on the longest path; the root sends most, k ceil(log2 P) entries."""

    about: ClassVar[About] = About("Shi et al., ICDCS 2019", "2 ceil(log2 P)", "k ceil(log2 P) at the root")

    def __init__(self, place: Place) -> None:
        self.rank, self.workers = place.rank, place.workers
        self.layout = BlockLayout.contiguous(place.length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        ids, budgets = np.array([0]), np.array([entries(density, self.layout.length)])
        capacity = memory.capacity(ids, budgets)
        held = memory.take_largest(ids, budgets)
        children = []
        gap = 1
        while gap < self.workers and self.rank % (2 * gap) == 0:
            child = self.rank + gap
            if child < self.workers:
                (frame,) = yield Round([], [(child, capacity)], "gtopk reduce")
                theirs = memory.unpack(frame, ids, budgets, child).decode()
                held, dropped = memory.cut(memory.merge(held, theirs), int(budgets[0]))
                memory.give_back(dropped)
                children.append(child)
            gap *= 2
        coded = memory.code(held)
        if self.rank:
            parent = self.rank - gap
            yield Round([(parent, memory.pack(coded, budgets))], [], "gtopk reduce")
            (frame,) = yield Round([], [(parent, capacity)], "gtopk broadcast")
            coded = memory.unpack(frame, ids, budgets, parent)
        for child in reversed(children):
            yield Round([(child, memory.pack(coded, budgets))], [], "gtopk broadcast")
        return coded.decode()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
