"""By which blocks entries are addressed: those of now, those of before, or all of a vector as one block."""

import numpy as np
import torch
from torch import Tensor

from spardl.host import download, spread, upload
from spardl.memory.buffer import Buffer, single
from spardl.sparse import Array, Ints, SparseBlocks


class Addresses:
    """Entries in, the same entries out, addressed otherwise. Blocks are the buffer's present ones."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def positions(self, entries: SparseBlocks) -> Tensor:
        """Where entries lie in the vector."""
        return self._buffer.positions(entries)

    def counts_in_blocks(self, entries: SparseBlocks) -> Array:
        """How many of these, which are addressed as one block, lie in each block; on the device."""
        if len(self._buffer.starts) == 2:
            return entries.counts
        starts = upload(self._buffer.starts, self._buffer.device).to(entries.indices.dtype)
        counts = torch.searchsorted(entries.indices, starts).diff()
        return counts if counts.device.type != "cpu" else counts.numpy()

    def in_blocks(self, entries: SparseBlocks, counts: Ints | None = None) -> SparseBlocks:
        """Entries that are addressed as one block, by block. If nobody says how many lie in each, the host waits."""
        if len(self._buffer.starts) == 2:
            return SparseBlocks(entries.ids, entries.counts, entries.indices.int(), entries.amounts)
        if counts is None:
            counts = download(torch.as_tensor(self.counts_in_blocks(entries)))
        firsts = spread(self._buffer.starts[:-1], counts, self._buffer.device)
        return SparseBlocks(np.arange(len(counts)), counts, (entries.indices - firsts).int(), entries.amounts)

    def in_present_blocks(self, entries: SparseBlocks, starts: Ints) -> SparseBlocks:
        """Entries that were addressed by blocks at other `starts`."""
        firsts = spread(starts[entries.ids], entries.counts, self._buffer.device)
        return self.in_blocks(single(firsts + entries.indices, entries.values))

    def in_order(self, entries: SparseBlocks) -> SparseBlocks:
        """Entries in any order, sorted by position."""
        places, order = torch.sort(self.positions(entries))
        return self.in_blocks(single(places, entries.values[order]))
