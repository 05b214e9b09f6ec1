"""Which entries may be among the largest, noted while gradients are added, so that selection need not read all again.

From one step to the next the last selected magnitude changes little. So whoever adds a gradient notes where the sum
reaches a key a bit below it, and selection looks at these places alone. It is exact all the same: if the listed entries
that reach the key suffice for the budget, nothing that is not listed can belong to the selection; if they do not
suffice, or are too many, the whole block is looked at as if there were no list.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

INFINITE = np.uint32(0x7F800000)  # the key of infinity: what reaches it is not finite
ROOM = 4  # times the budget, for a list that aims at a bit more than one
MEANT = 16  # a block that sends more than one entry in so many has no list
STEP = np.uint32(1 << 19)  # down to the key of about 95 %: thresholds move slowly


class Shortlist:
    """One list per block, of places and of what is there. While `fills[b]` is at most its room, every entry of block b
    whose key is `lows[b]` or more is in it, in ascending order. A list serves one selection."""

    def __init__(self, blocks: int) -> None:
        self.lows = np.full(blocks, INFINITE, np.uint32)
        self.fills = np.zeros(blocks, np.int64)
        self.edges = np.zeros(blocks + 1, np.int64)
        self.places = np.empty(0, np.int32)
        self.amounts = np.empty(0, np.float32)
        self.next_lows = self.lows.copy()
        self.wanted = np.zeros(blocks, np.int64)  # room in the next step

    def begin(self) -> None:
        """A new step: what the last one has learned counts."""
        self.lows[:] = self.next_lows
        self.next_lows[:] = INFINITE
        self.fills[:] = 0
        rooms = np.diff(self.edges)
        if ((self.wanted > rooms) | (4 * self.wanted < rooms)).any():
            self.edges[1:] = np.cumsum(self.wanted)
            self.places = np.empty(self.edges[-1], np.int32)
            self.amounts = np.empty(self.edges[-1], np.float32)
        self.wanted[:] = 0

    def give_up(self) -> None:
        """Nothing is known any more in this step: the lists have served, or not all was added in order."""
        self.fills[:] = np.iinfo(np.int64).max

    @property
    def lists(self) -> tuple[Ints, Ints, NDArray[np.int32], NDArray[np.float32]]:
        """As the compiled loops take them. The one that selects also says how much room the next step wants."""
        return self.edges, self.fills, self.places, self.amounts

    def expect_above(self, key: np.uint32, count: int) -> None:
        """In the next step, list what a similar threshold needs; about `count` reached this one. For a single block."""
        self.next_lows[0] = min(self.next_lows[0], max(key - STEP, np.uint32(1)) if key > STEP else INFINITE)
        self.wanted[0] = max(self.wanted[0], ROOM * count + 64)

    def down_to(self, key: np.uint32) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Places and amounts of all that reaches `key`, and more; None if not known. For a single block."""
        fill = self.fills[0]
        if len(self.fills) > 1 or self.lows[0] > key or not 0 < self.edges[1] >= fill:
            return None
        return self.places[:fill], self.amounts[:fill]
