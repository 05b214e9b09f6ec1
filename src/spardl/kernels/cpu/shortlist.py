"""Which entries may be among the largest, noted while gradients are added, so that selection need not read all again.

From one step to the next the magnitude of the last selected entry changes little. So the loop that adds a gradient
lists the entries whose sum reaches a key a bit below it, and selection looks at these alone. It is exact all the same:
if the listed entries that reach the key suffice for the budget, nothing that is not listed can belong to the selection;
if they do not suffice, or are too many, the whole block is looked at as if there were no list.
"""

import numpy as np
from numpy.typing import NDArray

from spardl.kernels.cpu.arguments import Lists, NextLists
from spardl.kernels.cpu.jit import INFINITE_KEY

LIST_ROOM = 4  # entries per entry of the budget that a list has room for; it aims at little more than one
SPARE_ROOM = 64  # entries that it has room for besides
MIN_ELEMENTS_PER_ENTRY = 16  # a block that sends more than one entry in so many has no list
THRESHOLD_DRIFT = np.uint32(1 << 19)  # keys between a threshold and about 95 % of it: thresholds move slowly
INVALID_FILL = np.int64(1 << 62)  # entries of a list that nobody may use: more than any room, and far from overflow


class CpuShortlist:
    """One list per block. While its fill is at most its room, every entry of the block whose key is its low or more is
    in it, in ascending order. A list serves one selection."""

    def __init__(self, blocks: int) -> None:
        lows = np.full(blocks, INFINITE_KEY, np.uint32)
        edges, fills = np.zeros(blocks + 1, np.int64), np.zeros(blocks, np.int64)
        self.lists = Lists(lows, edges, fills, np.empty(0, np.int32), np.empty(0, np.float32))
        self.next = NextLists(lows.copy(), np.zeros(blocks, np.int64))

    def begin(self) -> None:
        lows, edges, fills, _, _ = self.lists
        next_lows, rooms = self.next
        lows[:] = next_lows
        next_lows[:] = INFINITE_KEY
        fills[:] = 0
        present = np.diff(edges)
        if ((rooms > present) | (4 * rooms < present)).any():
            edges[1:] = np.cumsum(rooms)
            room = int(edges[-1])
            self.lists = Lists(lows, edges, fills, np.empty(room, np.int32), np.empty(room, np.float32))
        rooms[:] = 0

    def give_up(self) -> None:
        self.lists.fills[:] = INVALID_FILL

    def expect_above(self, key: np.uint32, count: int) -> None:
        """In the next step, list what a similar threshold needs; about `count` reached this one. For a single block."""
        lows, rooms = self.next
        low = max(key - THRESHOLD_DRIFT, np.uint32(1)) if key > THRESHOLD_DRIFT else INFINITE_KEY
        lows[0] = min(lows[0], low)
        rooms[0] = max(rooms[0], LIST_ROOM * count + SPARE_ROOM)

    def down_to(self, key: np.uint32) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Places and amounts of all that reaches `key`, and more; None if not known. For a single block."""
        lows, edges, fills, places, amounts = self.lists
        fill = fills[0]
        if len(fills) > 1 or lows[0] > key or not 0 < edges[1] >= fill:
            return None
        return places[:fill], amounts[:fill]
