"""Entries straight to the owners of their blocks: one round, one message to each peer."""

import numpy as np

from spardl.collectives.memory import Memory
from spardl.collectives.program import Program, Round, Team
from spardl.sparse import Ints, SparseBlocks
from spardl.wire.frame import CodedBlocks


def send_to_owners(team: Team, memory: Memory, coded: CodedBlocks, limits: Ints) -> Program[list[SparseBlocks]]:
    """Member b owns block b. Return all members' entries of this member's block, in member order.

    `coded` has every block, block b with at most `limits[b]` entries. Messages leave in rotated order, so that no owner
    is written to by all at once.
    """
    pieces = coded.split()
    own = np.array([team.position])
    distances = range(1, team.size)
    sends = []
    for distance in distances:
        block = (team.position + distance) % team.size
        sends.append((team.member(distance), memory.pack(pieces[block], limits[block : block + 1])))
    capacity = memory.capacity(own, limits[own])
    frames = yield Round(sends, [(team.member(-distance), capacity) for distance in distances], "to owners")
    versions = [pieces[team.position]] * team.size
    for distance, frame in zip(distances, frames, strict=True):
        sender = (team.position - distance) % team.size
        versions[sender] = memory.unpack(frame, own, limits[own], team.member(-distance))
    return [version.decode() for version in versions]
