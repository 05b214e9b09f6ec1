"""SparDL: sparse all-reduce by Spar-Reduce-Scatter, Spar-All-Gather between teams, and Bruck all-gather.

Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse Communication", ICDE 2024.
For P workers in d teams of m = P/d, and k entries in all, a worker sends

    d = 1     2 ceil(log2 P) rounds               2k (P-1)/P entries
    R-SAG     2 ceil(log2 m) + log2 d rounds      k (2(P-d) + d log2 d)/P entries
    B-SAG     2 ceil(log2 m) + ceil(log2 d)       k (2(P-d))/P + h (d-1) entries, h between k/P and kd/P
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spardl.choices import is_count, is_power_of_two, setting
from spardl.collectives.bruck import gather_joined
from spardl.collectives.method import About, BlockOptions, NoOptions, Seat
from spardl.collectives.price import Price
from spardl.collectives.program import Program, Team
from spardl.collectives.reduce_scatter import eager_reduce_scatter, spar_reduce_scatter
from spardl.collectives.snapshot import Snapshot
from spardl.collectives.team_gather import TopController, bruck_team_gather, recursive_team_gather
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import SparseBlocks

NUMBERED = "numbered"
SHORT = {"r": "recursive", "b": "bruck"}


def _check_teams(name: str, teams: object) -> None:
    if teams != "auto" and not is_count(teams, least=1):
        raise ConfigError(f'teams={teams!r} is not a number of teams; give 1 or more, or teams="auto".')


def _check_order(name: str, order: object) -> None:
    if order != NUMBERED and not (isinstance(order, list | tuple) and all(is_count(rank) for rank in order)):
        raise ConfigError(f"order={order!r} lists no ranks; give all of them once, such as (0, 2, 1, 3).")


def ranks_in(text: str) -> tuple[int, ...] | str:
    """`0,2,1,3`, as the command line has it."""
    return text if text == NUMBERED else tuple(int(part) for part in text.split(","))


@dataclass(frozen=True)
class SparDLOptions(BlockOptions):
    """What can be chosen about SparDL."""

    teams: int | str = setting(
        "auto",
        "number of teams, a divisor of the workers; auto is two for even worker counts: as cheap as one, a round less",
        check=_check_teams,
        parse=lambda text: text if text == "auto" else int(text),
        metavar="N",
    )
    order: tuple[int, ...] | str = setting(
        NUMBERED,
        "all ranks in the order in which they form teams, such as 0,2,1,3 where 0 and 2 are close to each other;"
        " numbered is as they are",
        check=_check_order,
        parse=ranks_in,
        metavar="RANKS",
    )
    gather: str = setting(
        "auto",
        "how teams agree: recursive doubling (a power of two of teams), or bruck (any number)",
        choices=("auto", "recursive", "bruck", *SHORT),
    )
    selection: str = setting(
        "lazy",
        "lazy cuts a block once, before it is sent; eager before and after every addition, for comparison",
        choices=("lazy", "eager"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "gather", SHORT.get(self.gather, self.gather))
        if self.order != NUMBERED:
            object.__setattr__(self, "order", tuple(self.order))

    def check_for(self, workers: int) -> None:
        teams = self.teams_of(workers)
        if workers % teams:
            divisors = ", ".join(str(d) for d in range(1, workers + 1) if workers % d == 0)
            raise ConfigError(
                f"{workers} workers cannot form {teams} equal teams;"
                f' choose teams from {divisors} or leave it to teams="auto".'
            )
        if sorted(self.ranks_of(workers)) != list(range(workers)):
            raise ConfigError(f"order={self.order} does not list the ranks 0 to {workers - 1}, each once.")
        if self.gather == "recursive" and not is_power_of_two(teams):
            raise ConfigError(
                f'gather="recursive" needs a power of two of teams, not {teams}; use gather="bruck" or gather="auto".'
            )

    def teams_of(self, workers: int) -> int:
        """The number of teams for this worker count."""
        if self.teams == "auto":
            return 2 if workers % 2 == 0 else 1
        return int(self.teams)

    def ranks_of(self, workers: int) -> tuple[int, ...]:
        """All ranks in the order in which they form teams."""
        return tuple(range(workers)) if isinstance(self.order, str) else self.order

    def gather_of(self, workers: int) -> str:
        """How the teams of this worker count agree: "recursive" or "bruck"."""
        if self.gather == "auto":
            return "recursive" if is_power_of_two(self.teams_of(workers)) else "bruck"
        return self.gather


class SparDL:
    """Ranks that follow one another, as numbered or in a given order, form a team; members at the same position own the
    same block."""

    about: ClassVar[About] = About(
        paper="Zhao et al., ICDE 2024",
        rounds=Price("2*ceil(log2(P/d)) + ceil(log2(d))"),
        entries=Price("2*k*(P-d)/P + k*d*ceil(log2(d))/P", "2*k*(P-d)/P + k*d*(d-1)/P"),
        note="the least with recursive doubling between teams, the most with Bruck's gather",
        by_blocks=True,
    )
    Options: ClassVar[type[NoOptions]] = SparDLOptions

    def __init__(self, seat: Seat) -> None:
        options = seat.options
        assert isinstance(options, SparDLOptions)
        options.check_for(seat.workers)
        teams = options.teams_of(seat.workers)
        size = seat.workers // teams
        ranks = options.ranks_of(seat.workers)
        team, position = divmod(ranks.index(seat.rank), size)
        self.team = Team(ranks[team * size : (team + 1) * size], position)
        self.teams = Team(ranks[position::size], team)
        self.layout = options.layout(seat.length, size)
        self.gather = options.gather_of(seat.workers)
        self.reduce_scatter = spar_reduce_scatter if options.selection == "lazy" else eager_reduce_scatter
        self.top = TopController(teams, int(self.layout.lengths[position]))

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        budgets = self.layout.budgets(density)
        budget = int(budgets[self.team.position])
        self.top.begin(budget)
        bruck_teams = self.teams.size > 1 and self.gather == "bruck"

        mine = yield from self.reduce_scatter(self.team, memory, budgets, self.top.size if bruck_teams else budget)
        if bruck_teams:
            agreed = yield from bruck_team_gather(self.teams, memory, mine, budget, self.top)
        else:
            agreed = yield from recursive_team_gather(self.teams, memory, mine, budget)
        everyone = np.arange(self.team.size)
        blocks = yield from gather_joined(self.team, memory.frames, agreed, everyone, budgets, full=True)
        return blocks.decode()

    def state_dict(self) -> dict[str, Any]:
        return {"top": self.top.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.top.load_state_dict(Snapshot("SparDL", state).part("top"))
