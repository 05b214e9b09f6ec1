"""All-gather of bytes: whatever each member has, of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spardl.collectives.bruck import bruck
from spardl.collectives.numbers import all_gather_numbers
from spardl.collectives.program import Program, Team
from spardl.errors import ProtocolError

if TYPE_CHECKING:
    from spardl.sparse import Array

Bytes = NDArray[np.uint8]


def gather_bytes(team: Team, mine: Bytes) -> Program[list[Bytes]]:
    """What every member has, in member order: twice ceil(log2 m) rounds, by Bruck's doubling."""
    sizes = yield from all_gather_numbers(team, [mine.size], "sizes of states")
    return (yield from bruck(team, mine, _Stretches(sizes[:, 0].tolist()), "states"))


class _Stretches:
    """A parcel of `sizes[i]` bytes of member i."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def capacity(self, members: list[int]) -> int:
        return sum(self._sizes[member] for member in members)

    def pack(self, items: list[Bytes], members: list[int]) -> Bytes:
        return np.concatenate(items)

    def unpack(self, frame: Array, members: list[int], peer: int) -> list[Bytes]:
        received = frame if isinstance(frame, np.ndarray) else frame.cpu().numpy()
        if received.size != self.capacity(members):
            raise ProtocolError(f"rank {peer} sent {received.size} bytes of states instead of their size.", peer=peer)
        return np.split(received, np.cumsum([self._sizes[member] for member in members])[:-1])
