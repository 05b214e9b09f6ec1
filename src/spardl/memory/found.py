"""Entries whose number a device may know before the host does."""

from collections.abc import Callable
from dataclasses import dataclass

from spardl.host import Count
from spardl.sparse import SparseBlocks


@dataclass(frozen=True, slots=True)
class Found:
    """Entries of one block, of which there are `count`: on a CPU a number, on a device one that nobody has waited for.

    `entries(count)` are they, when the host knows how many there are; what they are about must not have changed.
    """

    count: Count
    entries: Callable[[int], SparseBlocks]

    @staticmethod
    def at_hand(entries: SparseBlocks) -> "Found":
        """These, which need not be counted."""
        return Found(len(entries), lambda count: entries)
