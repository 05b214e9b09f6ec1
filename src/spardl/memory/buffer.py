"""Values in block order: what selections take entries out of, and what arriving entries are added to.

A buffer knows nothing of steps. Blocks are those of its layout, unless a method whose blocks are stretches of natural
order has drawn other boundaries (`repartition`).
"""

import numpy as np
import torch
from torch import Tensor

from spardl.host import Count, Flag, spread
from spardl.kernels.api import Kernels, Shortlist
from spardl.memory.layout import BlockLayout
from spardl.memory.listing import Listing
from spardl.sparse import Array, Ints, SparseBlocks


class Buffer:
    """`layout.length` float32 values, zero at first. `offset` is a natural position; collectives address blocks."""

    def __init__(self, layout: BlockLayout, kernels: Kernels, device: torch.device) -> None:
        self.layout = layout
        self.starts, self.lengths = layout.starts, layout.lengths
        self.device = device
        self.kernels = kernels
        self.values = zeros(layout.length, device)
        self.array = kernels.array(self.values)  # the same memory
        self.listing = Listing(kernels, layout.count, layout.length)

    # --- taking and adding ----------------------------------------------------------------------------------------

    def take_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        """Move the `budgets[i]` entries of largest magnitude out of each block `ids[i]`; they become zero here."""
        return SparseBlocks(ids, *self.kernels.take_largest(*self._blocks(ids, budgets)))

    def take_rounded(self, ids: Ints, budgets: Ints) -> tuple[Ints, Array, Array, Flag]:
        """`take_largest`, of each entry only the nearest bf16: counts, places, codes, and whether all were finite."""
        return self.kernels.take_rounded(*self._blocks(ids, budgets))

    def _blocks(self, ids: Ints, budgets: Ints) -> tuple[Array, Ints, Ints, Ints, Ints | None, Shortlist | None]:
        """What the kernels that take entries need to know."""
        listed = (ids, self.listing.valid()) if self.starts is self.layout.starts else (None, None)
        return self.array, self.starts[ids], self.starts[ids + 1], budgets, *listed

    def take_largest_of_all(self, budget: int) -> SparseBlocks:
        """Move the `budget` entries of largest magnitude out, wherever they lie; addressed as one block."""
        whole = self.starts[:1], self.starts[-1:], np.array([budget])
        listed = (np.zeros(1, np.int64), self.listing.valid()) if self.layout.count == 1 else ()
        _, indices, values = self.kernels.take_largest(self.values, *whole, *listed)
        return single(indices, values)

    def take_above_of_all(self, threshold: float, limit: int) -> SparseBlocks:
        """Move the first `limit` entries of magnitude `threshold` or more out, wherever they lie; addressed as one
        block. Kernels that fill need a limit that is no more than there are."""
        return single(*self._take_above(0, self.layout.length, threshold, limit))

    def take_above(self, block: int, threshold: float, limit: int) -> SparseBlocks:
        """Move the first `limit` entries of magnitude `threshold` or more out of a block; as `take_above_of_all`."""
        first, stop = int(self.starts[block]), int(self.starts[block + 1])
        places, amounts = self._take_above(first, stop, threshold, limit)
        return SparseBlocks(np.array([block]), np.array([len(places)]), places, amounts)

    def _take_above(self, first: int, stop: int, threshold: float, limit: int) -> tuple[Array, Array]:
        listed = (self.listing.valid(),) if self.layout.count == 1 else ()
        return self.kernels.take_above(self.values, first, stop, threshold, limit, *listed)

    def count_above(self, threshold: float) -> Count:
        """How many values have magnitude `threshold` or more."""
        listed = (self.listing.valid(),) if self.layout.count == 1 else ()
        return self.kernels.count_above(self.values, threshold, *listed)

    def count_above_in(self, block: int, threshold: float) -> Count:
        """How many values of a block have."""
        stretch = self.values[int(self.starts[block]) : int(self.starts[block + 1])]
        return self.kernels.count_above(stretch, threshold)

    def at(self, entries: SparseBlocks) -> Tensor:
        """The values held at these coordinates."""
        return self.values[self.positions(entries)]

    def put(self, entries: SparseBlocks) -> None:
        """Overwrite the values at these coordinates."""
        self.values[self.positions(entries)] = entries.values

    def add(self, entries: SparseBlocks) -> None:
        """Add entries in place; indices are unique within a block. The shortlist learns of what became large."""
        added = (self.starts[entries.ids], entries.counts, entries.places, entries.amounts)
        listed = (entries.ids, self.listing.valid()) if self.starts is self.layout.starts else ()
        if not listed:
            self.listing.give_up()
        self.kernels.scatter_add(self.array, *added, *listed)

    # --- blocks and positions -------------------------------------------------------------------------------------

    def repartition(self, starts: Ints) -> None:
        """Draw other block boundaries, for methods whose blocks are stretches of natural order and move."""
        assert self.layout.count == 1 and starts[0] == 0 and starts[-1] == self.layout.length
        self.starts, self.lengths = starts, np.diff(starts)

    def positions(self, entries: SparseBlocks) -> Tensor:
        """Where entries lie in `values`."""
        return spread(self.starts[entries.ids], entries.counts, self.device) + entries.indices

    # --- natural order --------------------------------------------------------------------------------------------

    def natural(self, result: SparseBlocks, factor: float = 1.0) -> tuple[Array, Array]:
        """Natural positions (ascending) and `factor` times the values of a result that covers all blocks."""
        if self.layout.count == 1:
            return self.positions(result), result.values * factor
        return self.kernels.to_natural_order(
            self.layout.starts, self.layout.chunk, result.counts, result.places, result.amounts, factor
        )

    def read(self, offset: int, out: Tensor, source: Tensor | None = None) -> None:
        """Copy the natural stretch at `offset` into `out`: of these values, or of others in the same order."""
        memory = self.values if source is None else source
        self.kernels.read(memory, self.layout.starts, self.layout.chunk, offset, out)

    def write(self, offset: int, stretch: Tensor, target: Tensor | None = None) -> None:
        """Copy `stretch` to its natural place at `offset`: in these values, or in others in the same order."""
        memory = self.values if target is None else target
        self.kernels.write(memory, self.layout.starts, self.layout.chunk, offset, stretch)


def single(places: Array, amounts: Array) -> SparseBlocks:
    """Entries at ascending places, addressed as one block."""
    return SparseBlocks(np.zeros(1, np.int64), np.array([len(places)]), places, amounts)


def zeros(length: int, device: torch.device) -> Tensor:
    """Long-lived memory. On a CPU numpy asks for large pages, which makes access at random places faster."""
    if device.type != "cpu":
        return torch.zeros(length, device=device)
    values = np.empty(length, np.float32)
    values.fill(0)
    return torch.from_numpy(values)
