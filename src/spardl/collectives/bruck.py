"""All-gather by Bruck's doubling: every member ends with every member's item, in ceil(log2 m) rounds, for any m.

Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.
Cost: ceil(log2 m) rounds; each member sends m - 1 items in all. It is Spar-Reduce-Scatter run backwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from spardl.collectives.program import Program, Team

if TYPE_CHECKING:
    from spardl.memory.frames import Frames
    from spardl.sparse import Array, Ints
    from spardl.wire.frame import CodedBlocks

Item = TypeVar("Item")


class Parcel(Protocol[Item]):
    """How some members' items travel as one message. Unpacking gives every member the same bits."""

    def capacity(self, members: list[int]) -> int:
        """The most bytes that these members' items take together."""
        ...

    def pack(self, items: list[Item], members: list[int]) -> Array:
        """These members' items as bytes."""
        ...

    def unpack(self, frame: Array, members: list[int], peer: int) -> list[Item]:
        """What `pack` was given; `ProtocolError` if the rank `peer` has sent anything else."""
        ...


def bruck(team: Team, mine: Item, parcel: Parcel[Item], name: str) -> Program[list[Item]]:
    """Return the items of all members, in member order."""
    held = [mine]  # held[i] belongs to member (position + i) mod m
    while len(held) < team.size:
        gap = len(held)
        count = min(gap, team.size - gap)
        here = [(team.position + i) % team.size for i in range(count)]
        there = [(team.position + gap + i) % team.size for i in range(count)]
        (received,) = yield team.exchange(
            parcel.pack(held[:count], here),
            to=-gap,
            source=gap,
            send_capacity=parcel.capacity(here),
            receive_capacity=parcel.capacity(there),
            name=name,
        )
        held += parcel.unpack(received, there, team.member(gap))
    return held[-team.position :] + held[: -team.position] if team.position else held


def gather_blocks(
    team: Team,
    frames: Frames,
    mine: CodedBlocks,
    ids: Ints,
    budgets: Ints,
    name: str = "bruck_all_gather",
    *,
    full: bool = False,
) -> Program[list[CodedBlocks]]:
    """Return the blocks of all members, in member order. Member i contributes block `ids[i]`, within `budgets[i]`, or
    `full`, as many entries as that if kernels fill."""
    return (yield from gather_joined(team, frames, mine, ids, budgets, name, full=full)).split()


def gather_joined(
    team: Team,
    frames: Frames,
    mine: CodedBlocks,
    ids: Ints,
    budgets: Ints,
    name: str = "bruck_all_gather",
    *,
    full: bool = False,
) -> Program[CodedBlocks]:
    """`gather_blocks`, all blocks in one piece: what is held stays joined, so that a block costs no object of its own.

    Blocks are forwarded in the wire's format, so every member decodes the same bits.
    """
    order = (team.position + np.arange(team.size)) % team.size
    held = mine  # of the members order[0], order[1], ...
    while len(held.ids) < team.size:
        gap = len(held.ids)
        count = min(gap, team.size - gap)
        here, there = order[:count], order[gap : gap + count]
        (received,) = yield team.exchange(
            frames.pack(held.parted(count)[0], budgets[here]),
            to=-gap,
            source=gap,
            send_capacity=frames.capacity(ids[here], budgets[here]),
            receive_capacity=frames.capacity(ids[there], budgets[there]),
            name=name,
        )
        theirs = frames.unpack(received, ids[there], budgets[there], team.member(gap), full=full)
        held = frames.join([held, theirs])
    if not team.position:
        return held
    last, first = held.parted(team.size - team.position)
    return frames.join([first, last])
