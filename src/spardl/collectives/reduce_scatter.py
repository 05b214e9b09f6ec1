"""Spar-Reduce-Scatter: every member ends with its own block, summed over the team, and no message ever grows.

SparDL (Zhao et al., ICDE 2024). Cost for a team of m and a budget of b entries per block: ceil(log2 m) rounds, in which
each member sends (m - 1) * b entries. Works for any m, without idle members.

Member p sends block p + o (offset o) when the highest bit of o comes up: blocks with offsets in [gap, 2 gap) go to the
member `gap` further on, for gap = ..., 4, 2, 1. There their offset is smaller than gap, so they travel on in a later
round, once per set bit, until the offset is 0. A block that was sent is never received again, so all blocks of a round
go in one message, and each is cut down to its budget just before it leaves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from spardl.collectives.program import Program, Team
from spardl.sparse import split

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import Ints
    from spardl.wire.frame import CodedBlocks


@functools.lru_cache(maxsize=256)  # of a large team the blocks of one member alone take a hundred kilobytes
def schedule(size: int, position: int) -> list[tuple[int, Ints, Ints]]:
    """For each round the distance, the blocks to send that far forward, and the blocks that arrive from as far back."""
    rounds = []
    gap = 1 << max(0, size - 1).bit_length()
    while gap := gap // 2:
        arriving = (position + np.arange(min(2 * gap, size) - gap)) % size
        rounds.append((gap, (arriving + gap) % size, arriving))
    return rounds


def spar_reduce_scatter(team: Team, memory: Memory, budgets: Ints, own_budget: int) -> Program[CodedBlocks]:
    """Return this member's block, in the wire's format: the `own_budget` largest sums of what reached it.

    Lazy: a block stays dense in memory and is cut once, when it leaves, over this member's values and all that arrived.
    Blocks that leave in later rounds are added up while the first ones travel.
    """
    for gap, sent, arriving in schedule(team.size, team.position):
        coded = memory.take_coded(sent, budgets[sent])
        received = yield from _exchange(team, memory, coded, gap, arriving, budgets)
        memory.give_back(received.decode())
    return memory.take_coded(np.array([team.position]), np.array([own_budget]))


def eager_reduce_scatter(team: Team, memory: Memory, budgets: Ints, own_budget: int) -> Program[CodedBlocks]:
    """Return this member's block as `spar_reduce_scatter` does, cutting every block at once and after each addition.

    All state is sparse then. It drops more on the way than the lazy form; it is here for comparison.
    """
    algebra, frames = memory.algebra, memory.frames
    everything = memory.take_largest(np.arange(team.size), budgets)
    held = split(everything)
    for gap, sent, arriving in schedule(team.size, team.position):
        coded = frames.join([frames.code(held[block]) for block in sent])
        received = yield from _exchange(team, memory, coded, gap, arriving, budgets)
        for block, piece in zip(arriving, received.split(), strict=True):
            held[block], dropped = algebra.cut(algebra.merge(held[block], piece.decode()), int(budgets[block]))
            memory.give_back(dropped)
    mine, dropped = algebra.cut(held[team.position], own_budget)
    memory.give_back(dropped)
    return frames.code(mine)


def _exchange(
    team: Team, memory: Memory, coded: CodedBlocks, gap: int, arriving: Ints, budgets: Ints
) -> Program[CodedBlocks]:
    frames = memory.frames
    frame = frames.pack(coded, budgets[coded.ids])
    (received,) = yield team.exchange(
        frame,
        to=gap,
        source=-gap,
        send_capacity=frames.capacity(coded.ids, budgets[coded.ids]),
        receive_capacity=frames.capacity(arriving, budgets[arriving]),
        name="spar_reduce_scatter",
        meanwhile=memory.meanwhile,
    )
    return frames.unpack(received, arriving, budgets[arriving], team.member(-gap), full=True)
