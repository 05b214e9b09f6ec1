"""Equal slices: members that hold different numbers of entries deal them out anew, in order.

A gather is as slow as its largest piece. After this round all pieces are alike, whoever had summed what.
Cost: one round; a member sends only what it has too much of, so at most its own entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spardl.collectives.program import Message, Program, Round, Team
from spardl.errors import ProtocolError
from spardl.sparse import SparseBlocks

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import Ints

WHOLE = np.array([0])  # the one block that all entries are addressed by


def deal_evenly(team: Team, memory: Memory, mine: SparseBlocks, counts: Ints) -> Program[tuple[SparseBlocks, Ints]]:
    """This member's slice of all members' entries, and the sizes of all slices.

    Member i holds `counts[i]` entries of block 0, all of them before those of member i + 1.
    """
    held = np.concatenate(([0], np.cumsum(counts)))
    wanted = np.arange(team.size + 1) * held[-1] // team.size

    def overlap(holder: int, taker: int) -> tuple[int, int]:
        return max(held[holder], wanted[taker]), min(held[holder + 1], wanted[taker + 1])

    sends, receives = [], []
    kept = memory.nothing(WHOLE)
    for distance in range(team.size):
        taker, giver = (team.position + distance) % team.size, (team.position - distance) % team.size
        first, stop = overlap(team.position, taker)
        if first < stop:
            piece = _slice(mine, first - held[team.position], stop - held[team.position])
            if distance:
                size = np.array([stop - first])
                frame = memory.frames.pack(memory.frames.code(piece), size)
                sends.append(Message(team.member(distance), frame, memory.frames.capacity(WHOLE, size)))
            else:
                kept = piece
        first, stop = overlap(giver, team.position)
        if distance and first < stop:
            receives.append((giver, -distance, np.array([stop - first])))
    places = [(team.member(distance), memory.frames.capacity(WHOLE, size)) for _, distance, size in receives]
    frames = yield Round(sends, places, "balance")
    pieces = {team.position: kept}
    for (giver, distance, size), frame in zip(receives, frames, strict=True):
        pieces[giver] = memory.frames.unpack(frame, WHOLE, size, team.member(distance), full=True).decode()
    return join(team, memory, pieces), np.diff(wanted)


def _slice(entries: SparseBlocks, first: int, stop: int) -> SparseBlocks:
    return SparseBlocks(WHOLE, np.array([stop - first]), entries.indices[first:stop], entries.values[first:stop])


def join(team: Team, memory: Memory, pieces: dict[int, SparseBlocks]) -> SparseBlocks:
    """Slices of one block, by the member that they came from, as one. Each ascends; so must all of them together.

    A device tells when the step is over whether they do; if not, they are zeros until then.
    """
    members = [member for member in sorted(pieces) if len(pieces[member])]
    if not members:
        return memory.nothing(WHOLE)
    import torch  # when it is used: the command line lists methods without it

    indices = [pieces[member].indices for member in members]
    in_order = torch.stack([each[0] for each in indices])[1:] > torch.stack([each[-1] for each in indices])[:-1]

    def blame(found: Ints) -> None:
        if not found.all():
            rank = team.ranks[members[1 + int(found.argmin())]]
            raise ProtocolError(f"rank {rank} sent entries of another rank's slice; none was applied.", peer=rank)

    fine = in_order.all()
    memory.health.ask(in_order, blame)
    memory.health.note(fine)
    places, amounts = torch.cat(indices), torch.cat([pieces[member].values for member in members])
    if memory.fills:
        places = places.where(fine, torch.arange(len(places), dtype=places.dtype, device=places.device))
        amounts = amounts.where(fine, 0.0)
    return SparseBlocks(WHOLE, np.array([len(places)]), places, amounts)
