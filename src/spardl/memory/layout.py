"""How a group's elements are dealt to blocks, and how many entries each block may send."""

import functools
from dataclasses import dataclass

import numpy as np

from spardl.errors import ConfigError
from spardl.sparse import Ints

MAX_BLOCK = 2**31 - 1  # elements that 32-bit indices reach

CHUNKS_PER_BLOCK = 512  # make an interleaved block a fair sample of all layers
MAX_CHUNK = 8192  # elements whose memory streams as fast as if the whole block were one stretch


@dataclass(frozen=True)
class BlockLayout:
    """`length` elements in `count` blocks: chunk after chunk is dealt to block 0, 1, ..., count - 1, 0, ...

    Memory is kept in block order, each block contiguous; "natural" order is that of the tensors. With small chunks each
    block is a fair sample of all layers; with one chunk per block the blocks are contiguous stretches, as in the paper.
    """

    length: int
    count: int
    chunk: int

    def __post_init__(self) -> None:
        longest = self.lengths.max(initial=0)
        if longest > MAX_BLOCK:
            raise ConfigError(
                f"a block of {longest} elements is longer than 32-bit indices reach; give groups={MAX_BLOCK} or fewer."
            )

    @staticmethod
    def interleaved(length: int, count: int) -> "BlockLayout":
        """Chunks of a power of two, at most MAX_CHUNK elements; CHUNKS_PER_BLOCK or more a block where that fits."""
        fair = length // (count * CHUNKS_PER_BLOCK)
        return BlockLayout(length, count, min(MAX_CHUNK, 1 << max(0, fair.bit_length() - 1)))

    @staticmethod
    def contiguous(length: int, count: int) -> "BlockLayout":
        return BlockLayout(length, count, max(1, -(-length // count)))

    @functools.cached_property
    def lengths(self) -> Ints:
        pieces = -(-self.length // self.chunk)
        dealt = np.full(self.count, pieces // self.count, np.int64)
        dealt[: pieces % self.count] += 1
        lengths = dealt * self.chunk
        if pieces:
            lengths[(pieces - 1) % self.count] -= pieces * self.chunk - self.length
        return lengths

    @functools.cached_property
    def starts(self) -> Ints:
        """Where each block begins in block order; the last entry is the length."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    def budgets(self, density: float) -> Ints:
        """Entries that each block may send: density * length in all, spread by length; one where that is none.

        A block without a budget would never be sent, so very small densities are exceeded rather than starved.
        """
        return _budgets(self, density).copy()


@functools.lru_cache(maxsize=256)
def _budgets(layout: BlockLayout, density: float) -> Ints:
    edges = layout.starts * entries(density, layout.length) // max(1, layout.length)
    return np.minimum(np.maximum(np.diff(edges), 1), layout.lengths)


def entries(density: float, length: int) -> int:
    """k: how many of `length` entries this density allows; at least one, if there are any."""
    return min(length, max(1, round(density * length)))
