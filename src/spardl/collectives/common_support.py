"""Coordinates that all workers know, and the sum of all workers' values there: nothing is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spardl.collectives.bruck import bruck, gather_joined
from spardl.collectives.owners import exchange_with_owners
from spardl.collectives.program import Program, Team
from spardl.sparse import SparseBlocks, join

if TYPE_CHECKING:
    from torch import Tensor

    from spardl.memory.frames import Frames
    from spardl.memory.memory import Memory
    from spardl.sparse import Array, Ints


def gather_support(team: Team, memory: Memory, chosen: SparseBlocks, ids: Ints, limits: Ints) -> Program[SparseBlocks]:
    """Return the coordinates that all members chose, member by member: only indices travel, in ceil(log2 m) rounds.

    Member i chose in block `ids[i]`, and `limits[i]` entries; or fewer, where it could not fill that.
    """
    indices = memory.frames.without_values()
    mine = indices.code(chosen)
    return (yield from gather_joined(team, indices, mine, ids, limits, name="indices", full=True)).decode()


def sum_at(team: Team, memory: Memory, support: SparseBlocks) -> Program[SparseBlocks]:
    """Take the values at `support` out of every member's memory and return their sum, with the same bits on all.

    Member b sums block b, in member order: one round of m - 1 messages there, ceil(log2 m) rounds back, in all
    2 (m - 1)/m values per coordinate and member. Whoever rounds keeps the error.
    """
    frames, sizes = memory.frames, support.counts.tolist()
    taken = memory.take_at(support)
    packed = [frames.pack_values(values) for values in taken.split(sizes)]
    frames.keep_error(support, taken - join([seen for _, seen in packed]))

    total = yield from _sum_own_block(team, memory, packed, sizes)
    frame, seen = frames.pack_values(total)
    frames.keep_error(_block(support, team.position, total), total - seen)
    sums = yield from bruck(team, (frame, seen), _Sums(frames, sizes), "sums")
    return SparseBlocks(support.ids, support.counts, support.indices, join([values for _, values in sums]))


def _sum_own_block(
    team: Team, memory: Memory, packed: list[tuple[Tensor, Tensor]], sizes: list[int]
) -> Program[Tensor]:
    """Send each block's values to its owner, and add up what arrives for this member's block, in member order."""
    frames, own = memory.frames, sizes[team.position]
    arrived = yield from exchange_with_owners(
        team, lambda block: packed[block][0], lambda _, block: frames.values_capacity(sizes[block]), "values to owners"
    )
    versions = {sender: frames.unpack_values(frame, own, team.ranks[sender]) for sender, frame in arrived}
    versions[team.position] = packed[team.position][1]
    total = memory.algebra.zeros(own)
    for member in range(team.size):
        total += versions[member]
    return total


def _block(support: SparseBlocks, position: int, values: Tensor) -> SparseBlocks:
    """One block of the support, with these values."""
    first = int(support.counts[:position].sum())
    own = slice(position, position + 1)
    return SparseBlocks(support.ids[own], support.counts[own], support.indices[first : first + len(values)], values)


class _Sums:
    """A parcel of one values frame per member, beside what it decodes to. Every member decodes the same bytes."""

    def __init__(self, frames: Frames, sizes: list[int]) -> None:
        self._frames, self._sizes = frames, sizes

    def capacity(self, members: list[int]) -> int:
        return sum(self._frames.values_capacity(self._sizes[member]) for member in members)

    def pack(self, items: list[tuple[Tensor, Tensor]], members: list[int]) -> Array:
        return join([frame for frame, _ in items])

    def unpack(self, frame: Array, members: list[int], peer: int) -> list[tuple[Tensor, Tensor]]:
        counts = [self._sizes[member] for member in members]
        pieces = self._frames.split_values(frame, counts, peer)
        return [
            (piece, self._frames.unpack_values(piece, count, peer)) for piece, count in zip(pieces, counts, strict=True)
        ]
