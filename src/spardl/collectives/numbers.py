"""All-gather of a few whole numbers: counts, boundaries, histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spardl.collectives.bruck import bruck
from spardl.collectives.program import Program, Team
from spardl.errors import ProtocolError

if TYPE_CHECKING:
    from spardl.sparse import Array, Ints

Row = NDArray[np.int32]


def all_gather_numbers(team: Team, numbers: Sequence[int] | Ints, name: str = "numbers") -> Program[Ints]:
    """Every member's numbers (as many from each) as rows, in member order: ceil(log2 m) rounds by Bruck's doubling."""
    mine = np.asarray(numbers, np.int64)
    assert not mine.size or np.abs(mine).max() < 2**31, "these travel in 32 bits"
    rows = yield from bruck(team, mine.astype(np.int32), _Rows(mine.size), name)
    return np.stack(rows).astype(np.int64)


class _Rows:
    """A parcel of `width` 32-bit numbers per member."""

    def __init__(self, width: int) -> None:
        self._width = width

    def capacity(self, members: list[int]) -> int:
        return 4 * self._width * len(members)

    def pack(self, items: list[Row], members: list[int]) -> Array:
        return np.concatenate(items).view(np.uint8)

    def unpack(self, frame: Array, members: list[int], peer: int) -> list[Row]:
        size = self.capacity(members)
        if len(frame) != size:
            raise ProtocolError(f"rank {peer} sent {len(frame)} bytes of numbers instead of {size}.", peer=peer)
        from spardl.host import download  # when it is used: the command line lists methods without torch

        received = frame if isinstance(frame, np.ndarray) else download(frame)
        return list(received.view(np.int32).reshape(len(members), self._width))
