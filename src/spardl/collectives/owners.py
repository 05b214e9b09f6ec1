"""Entries straight to the owners of their blocks: one round, one message to each peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from spardl.collectives.numbers import all_gather_numbers
from spardl.collectives.program import Message, Program, Round, Team

if TYPE_CHECKING:
    from spardl.memory.frames import Frames
    from spardl.memory.memory import Memory
    from spardl.sparse import Array, Ints, SparseBlocks
    from spardl.wire.frame import CodedBlocks


def sort_for_owners(
    team: Team, memory: Memory, entries: SparseBlocks, limits: Ints
) -> Program[tuple[CodedBlocks, Ints]]:
    """Entries that are addressed as one block, coded by block, of which member b owns the b-th and gets `limits[b]` at
    the most; and how many each member sends to each owner at the most, [sender, owner].

    On a device, exactly as many, which costs ceil(log2 m) rounds: then no message is longer than it has to be, and
    nobody waits to know how many entries have arrived.
    """
    counts, most = memory.addresses.counts_in_blocks(entries), np.broadcast_to(limits, (team.size, team.size)).copy()
    if memory.fills:
        most = np.clip((yield from all_gather_numbers(team, counts, "counts for owners")), 0, most)
        counts = most[team.position]
    return memory.frames.code(memory.addresses.in_blocks(entries, np.asarray(counts))), most


def send_to_owners(
    team: Team, frames: Frames, coded: CodedBlocks, limits: Ints, *, full: bool = False
) -> Program[list[SparseBlocks]]:
    """Member b owns block b. Return all members' entries of this member's block, in member order.

    `coded` has every block, block b with at most `limits[b]` entries; or, if limits are [sender, owner], as many as
    that says, or exactly as many, if these are `full`.
    """
    pieces, most = coded.split(), np.broadcast_to(limits, (team.size, team.size)).copy()
    own = np.array([team.position])
    arrived = yield from exchange_with_owners(
        team,
        lambda block: frames.pack(pieces[block], most[team.position, block : block + 1]),
        lambda sender, block: frames.capacity(np.array([block]), most[sender, block : block + 1]),
        "to owners",
    )
    versions = [pieces[team.position]] * team.size
    for sender, frame in arrived:
        versions[sender] = frames.unpack(frame, own, most[sender, own], team.ranks[sender], full=full)
    return [version.decode() for version in versions]


def exchange_with_owners(
    team: Team, pack: Callable[[int], Array], capacity: Callable[[int, int], int], name: str
) -> Program[list[tuple[int, Array]]]:
    """Send frame `pack(b)` to every other member b: one round, m - 1 messages. Member a's to b has at most
    `capacity(a, b)` bytes.

    Returns what arrived for this member's block: each sender's position, and its frame. Messages leave in rotated
    order, so that no owner is written to by all at once.
    """
    own = team.position
    owners = [(own + distance) % team.size for distance in range(1, team.size)]
    senders = [(own - distance) % team.size for distance in range(1, team.size)]
    sends = [Message(team.ranks[owner], pack(owner), capacity(own, owner)) for owner in owners]
    arrived = yield Round(sends, [(team.ranks[sender], capacity(sender, own)) for sender in senders], name)
    return list(zip(senders, arrived, strict=True))
