"""Entries straight to the owners of their blocks: one round, one message to each peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from spardl.collectives.program import Message, Program, Round, Team

if TYPE_CHECKING:
    from spardl.memory.frames import Frames
    from spardl.sparse import Array, Ints, SparseBlocks
    from spardl.wire.frame import CodedBlocks


def send_to_owners(team: Team, frames: Frames, coded: CodedBlocks, limits: Ints) -> Program[list[SparseBlocks]]:
    """Member b owns block b. Return all members' entries of this member's block, in member order.

    `coded` has every block, block b with at most `limits[b]` entries.
    """
    pieces = coded.split()
    own = np.array([team.position])
    arrived = yield from exchange_with_owners(
        team,
        lambda block: frames.pack(pieces[block], limits[block : block + 1]),
        lambda block: frames.capacity(np.array([block]), limits[block : block + 1]),
        "to owners",
    )
    versions = [pieces[team.position]] * team.size
    for sender, frame in arrived:
        versions[sender] = frames.unpack(frame, own, limits[own], team.ranks[sender])
    return [version.decode() for version in versions]


def exchange_with_owners(
    team: Team, pack: Callable[[int], Array], capacity: Callable[[int], int], name: str
) -> Program[list[tuple[int, Array]]]:
    """Send frame `pack(b)`, of at most `capacity(b)` bytes, to every other member b: one round, m - 1 messages.

    Returns what arrived for this member's block: each sender's position, and its frame. Messages leave in rotated
    order, so that no owner is written to by all at once.
    """
    owners = [(team.position + distance) % team.size for distance in range(1, team.size)]
    senders = [(team.position - distance) % team.size for distance in range(1, team.size)]
    sends = [Message(team.ranks[owner], pack(owner), capacity(owner)) for owner in owners]
    room = capacity(team.position)
    arrived = yield Round(sends, [(team.ranks[sender], room) for sender in senders], name)
    return list(zip(senders, arrived, strict=True))
