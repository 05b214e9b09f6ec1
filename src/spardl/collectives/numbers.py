"""All-gather of a few whole numbers: counts, boundaries, histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spardl.collectives.bruck import bruck
from spardl.collectives.program import Program, Team, known
from spardl.errors import ProtocolError

if TYPE_CHECKING:
    from spardl.sparse import Array, Ints


def row(*parts: int | Sequence[int] | Array) -> Array:
    """Whole numbers, one after the other: on the device, if any of them are, else on the host. Nobody waits."""
    return _join([_flat(part) for part in parts])


def all_gather_numbers(team: Team, numbers: Sequence[int] | Array, name: str = "numbers") -> Program[Ints]:
    """Every member's numbers (as many from each) as rows, in member order: ceil(log2 m) rounds by Bruck's doubling.

    They may be on a device, and frames may be there: the host asks once, for all rows.
    """
    mine = _flat(numbers)
    if isinstance(mine, np.ndarray):
        assert not mine.size or np.abs(mine).max() < 2**31, "these travel in 32 bits"
        mine = mine.astype(np.int32)
    else:
        mine = mine.int()
    rows = yield from known(_join((yield from bruck(team, mine, _Rows(len(mine)), name))))
    return rows.reshape(team.size, len(mine))


def _flat(numbers: int | Sequence[int] | Array) -> Array:
    """An array of the host, or a tensor of a device."""
    if isinstance(numbers, int | Sequence | np.ndarray) or numbers.device.type == "cpu":
        return np.asarray(numbers, np.int64).reshape(-1)
    return numbers.flatten().long()


def _join(items: Sequence[Array]) -> Array:
    """One after the other, on the device if any of them are there."""
    away = next((each for each in items if not isinstance(each, np.ndarray)), None)
    if away is None:
        return np.concatenate(items)
    import torch  # when it is used: the command line lists methods without it

    from spardl.host import upload

    return torch.cat([upload(each, away.device) if isinstance(each, np.ndarray) else each for each in items])


class _Rows:
    """A parcel of `width` 32-bit numbers per member."""

    def __init__(self, width: int) -> None:
        self._width = width

    def capacity(self, members: list[int]) -> int:
        return 4 * self._width * len(members)

    def pack(self, items: list[Array], members: list[int]) -> Array:
        together = _join(items)
        if isinstance(together, np.ndarray):
            return together.view(np.uint8)
        import torch

        return together.view(torch.uint8)

    def unpack(self, frame: Array, members: list[int], peer: int) -> list[Array]:
        size = self.capacity(members)
        if len(frame) != size:
            raise ProtocolError(f"rank {peer} sent {len(frame)} bytes of numbers instead of {size}.", peer=peer)
        if isinstance(frame, np.ndarray) or frame.device.type == "cpu":
            received: Array = np.asarray(frame).view(np.int32)
        else:
            import torch

            received = frame.view(torch.int32)
        return list(received.reshape(len(members), self._width))
