"""All-gather by Bruck's doubling: every member ends with every member's block, in ceil(log2 m) rounds, for any m.

Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.
Cost: ceil(log2 m) rounds; each member sends m - 1 blocks in all. It is Spar-Reduce-Scatter run backwards.
"""

from spardl.collectives.memory import Memory
from spardl.collectives.program import Program, Team
from spardl.sparse import Ints
from spardl.wire.frame import CodedBlocks


def bruck_all_gather(
    team: Team, memory: Memory, mine: CodedBlocks, ids: Ints, budgets: Ints, name: str = "bruck_all_gather"
) -> Program[list[CodedBlocks]]:
    """Return the blocks of all members, in member order. Member i contributes block `ids[i]`, within `budgets[i]`.

    Blocks are forwarded in the wire's format, so every member decodes the same bits.
    """
    held = [mine]  # held[i] belongs to member (position + i) mod m
    while len(held) < team.size:
        gap = len(held)
        count = min(gap, team.size - gap)
        here = [(team.position + i) % team.size for i in range(count)]
        there = [(team.position + gap + i) % team.size for i in range(count)]
        frame = memory.pack(CodedBlocks.join(held[:count]), budgets[here])
        capacity = memory.capacity(ids[there], budgets[there])
        (received,) = yield team.exchange(frame, to=-gap, source=gap, capacity=capacity, name=name)
        held += memory.unpack(received, ids[there], budgets[there], team.member(gap)).split()
    return held[-team.position :] + held[: -team.position] if team.position else held
