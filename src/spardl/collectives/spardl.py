"""SparDL: sparse all-reduce by Spar-Reduce-Scatter, Spar-All-Gather between teams, and Bruck all-gather.

Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", ICDE 2024.
For P workers in d teams of m = P/d, and k entries in all, a worker sends

    d = 1     2 ceil(log2 P) rounds               2k (P-1)/P entries
    R-SAG     2 ceil(log2 m) + log2 d rounds      k (2(P-d) + d log2 d)/P entries
    B-SAG     2 ceil(log2 m) + ceil(log2 d)       k (2(P-d))/P + h (d-1) entries, h between k/P and kd/P
"""

from typing import Any, ClassVar

import numpy as np

from spardl.collectives.all_gather import bruck_all_gather
from spardl.collectives.memory import Memory
from spardl.collectives.method import About, Place, block_layout
from spardl.collectives.program import Program, Team
from spardl.collectives.reduce_scatter import eager_reduce_scatter, spar_reduce_scatter
from spardl.collectives.team_gather import TopController, bruck_team_gather, recursive_team_gather
from spardl.sparse import SparseBlocks
from spardl.wire.frame import CodedBlocks


class SparDL:
    """Contiguous ranks form a team; members at the same position own the same block."""

    about: ClassVar[About] = About(
        paper="Zhao et al., ICDE 2024",
        rounds="2 ceil(log2 P/d) + ceil(log2 d)",
        entries="2k (P-d)/P + (k d log2 d)/P with R-SAG; 2k (P-1)/P for d = 1",
        by_blocks=True,
    )

    def __init__(self, place: Place) -> None:
        config = place.config
        teams = config.resolved_teams(place.workers)
        size = place.workers // teams
        team, position = divmod(place.rank, size)
        self.team = Team(tuple(range(team * size, (team + 1) * size)), position)
        self.teams = Team(tuple(range(position, place.workers, size)), team)
        self.layout = block_layout(place, size)
        self.gather = config.resolved_gather(place.workers)
        self.reduce_scatter = spar_reduce_scatter if config.selection == "lazy" else eager_reduce_scatter
        self.top = TopController(teams, int(self.layout.lengths[position]))

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        budgets = self.layout.budgets(density)
        budget = int(budgets[self.team.position])
        self.top.begin(budget)
        bruck_teams = self.teams.size > 1 and self.gather == "b"

        mine = yield from self.reduce_scatter(self.team, memory, budgets, self.top.size if bruck_teams else budget)
        if bruck_teams:
            agreed = yield from bruck_team_gather(self.teams, memory, mine, budget, self.top)
        else:
            agreed = yield from recursive_team_gather(self.teams, memory, mine, budget)
        blocks = yield from bruck_all_gather(self.team, memory, agreed, np.arange(self.team.size), budgets)
        return CodedBlocks.join(blocks).decode()

    def state_dict(self) -> dict[str, Any]:
        return {"top": self.top.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.top = TopController(**state["top"])
