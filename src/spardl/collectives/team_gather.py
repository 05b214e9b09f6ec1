"""Spar-All-Gather: the members that own the same block in different teams agree on its sum, cut to the budget.

SparDL (Zhao et al., ICDE 2024). All of them must end with the same bits, so sums run in team order on every rank.
Several ranks compute the same cut; exactly one of them keeps what it drops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spardl.collectives.bruck import gather_blocks
from spardl.collectives.program import Program, Team
from spardl.collectives.snapshot import Snapshot

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks
    from spardl.wire.frame import CodedBlocks


def recursive_team_gather(teams: Team, memory: Memory, mine: CodedBlocks, budget: int) -> Program[CodedBlocks]:
    """R-SAG, for a power of two of teams: log2 d rounds, each with one block of at most `budget` entries.

    After round s, groups of 2**s members hold the same block.
    """
    frames, ids, budgets = memory.frames, mine.ids, np.array([budget])
    held = mine
    gap = 1
    while gap < teams.size:
        partner = (teams.position ^ gap) - teams.position
        frame = frames.pack(held, budgets)
        capacity = frames.capacity(ids, budgets)
        (received,) = yield teams.exchange(
            frame,
            to=partner,
            source=partner,
            send_capacity=capacity,
            receive_capacity=capacity,
            name="r_spar_all_gather",
        )
        theirs = frames.unpack(received, ids, budgets, teams.member(partner), full=True)
        lower, upper = (held, theirs) if partner > 0 else (theirs, held)
        gap *= 2
        union = memory.algebra.merge(lower.decode(), upper.decode())
        held = _agree(memory, union, budget, _keeps(teams, gap, int(ids[0])))
    return held


def bruck_team_gather(
    teams: Team, memory: Memory, mine: CodedBlocks, budget: int, top: TopController
) -> Program[CodedBlocks]:
    """B-SAG, for any number of teams: ceil(log2 d) rounds, d - 1 blocks of at most `top.size` entries.

    `mine` has been cut to `top.size`. All members see the same union, so their controllers stay equal by themselves.
    """
    ids, sizes = np.repeat(mine.ids, teams.size), np.full(teams.size, top.size)
    pieces = yield from gather_blocks(teams, memory.frames, mine, ids, sizes, name="b_spar_all_gather", full=True)
    import torch  # when it is used: the command line lists methods without it

    union = pieces[0].decode()
    for piece in pieces[1:]:
        union = memory.algebra.merge(union, piece.decode())
    memory.health.ask(torch.count_nonzero(union.values), lambda found: top.observe(int(found[0])))
    return _agree(memory, memory.algebra.filled(union, budget), budget, _keeps(teams, teams.size, int(ids[0])))


def _agree(memory: Memory, union: SparseBlocks, budget: int, keeps: bool) -> CodedBlocks:
    kept, dropped = memory.algebra.cut(union, budget)
    if keeps:
        memory.give_back(dropped)
    return memory.frames.code(kept, keep_error=keeps)


def _keeps(teams: Team, group: int, block: int) -> bool:
    """Whether this member is the one of its group that keeps drops and errors; another one for another block."""
    return teams.position % group == block % group


@dataclass
class TopController:
    """How many entries (h) a team offers in B-SAG, so that the union of all teams' offers just fills the budget.

    Starts at budget / d, where the union always fits; two good moves in a row double the stride, overshooting turns it
    round at half the speed. The released code froze for small blocks and had no ceiling; here a stride is at least one
    and h stays in [budget / d, budget]. Where the budget is the whole block, no union exceeds it, and h is all of it.
    """

    teams: int
    length: int
    budget: int = 0
    size: int = 0
    stride: int = 0
    inertia: bool = False

    def begin(self, budget: int) -> None:
        """Start over if the budget changed, keeping the share of it that h had reached."""
        if budget == self.budget:
            return
        share = self.size / self.budget if self.budget else 0.0
        self.budget = budget
        self.size = min(budget, max(self._floor, math.floor(share * budget)))
        self.stride = max(1, (budget - self.size) // 100)
        self.inertia = False

    def observe(self, union: int) -> None:
        """Learn how many entries the union of all offers had before the cut."""
        too_many = union > self.budget
        if too_many == (self.stride <= 0):
            self.stride *= 2 if self.inertia else 1
            self.inertia = not self.inertia
        else:
            self.stride = int(-self.stride / 2) if abs(self.stride) > 1 else -self.stride
            self.inertia = False
        self.size = min(self.budget, max(self._floor, self.size + self.stride))

    @property
    def _floor(self) -> int:
        return self.budget if self.budget >= self.length else max(1, self.budget // self.teams)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: Snapshot) -> None:
        budget = saved.count("budget", most=self.length)
        size, stride = saved.count("size", most=budget), saved.number("stride")
        self.budget, self.size, self.stride, self.inertia = budget, size, int(stride), saved.flag("inertia")
