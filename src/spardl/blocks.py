"""How a group's elements are dealt to blocks, and how many entries each block may send."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spardl.errors import ConfigError

Ints = NDArray[np.int64]
LONGEST = 2**31 - 1

# Of interleaved blocks: chunks in each that make it a fair sample, and elements of a chunk whose memory streams as fast
# as if all of it were one stretch.
FAIR, LONG = 512, 8192


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
        if longest > LONGEST:
            raise ConfigError(
                f"a block of {longest} elements is longer than 32-bit indices reach; give groups={LONGEST} or fewer."
            )

    @staticmethod
    def interleaved(length: int, count: int) -> "BlockLayout":
        """Chunks of a power of two, at most LONG; some FAIR of them or more in each block where that is possible."""
        fair = length // (count * FAIR)
        return BlockLayout(length, count, min(LONG, 1 << max(0, fair.bit_length() - 1)))

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
        return _budgets(self, density)


@functools.lru_cache(maxsize=256)
def _budgets(layout: BlockLayout, density: float) -> Ints:
    edges = layout.starts * entries(density, layout.length) // max(1, layout.length)
    return np.minimum(np.maximum(np.diff(edges), 1), layout.lengths)


def entries(density: float, length: int) -> int:
    """k: how many of `length` entries this density allows; at least one, if there are any."""
    return min(length, max(1, round(density * length)))
