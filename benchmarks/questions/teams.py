"""Which number of teams is best? Every power of two is simulated, and held against `spardl.collectives.teams`.

    python -m benchmarks.questions.teams --picture docs/pictures/teams.png

On a switch a step takes (rounds) x (latency) + (bytes of the messages that take longest) / (rate), so each number of
teams is simulated with a rate alone, and rounds and bytes make the times on every network. That they do is checked on
some of the networks.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spardl.choices import is_power_of_two
from spardl.cli.output import table
from spardl.collectives.teams import best_teams, team_counts
from spardl.config import SyncConfig
from spardl.simulator.simulation import SimulationReport, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
DENSITIES = (0.001, 0.01)
LATENCIES = (10e-6, 30e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 50e-3)
RATES = (1.25e6, 12.5e6, 125e6, 1.25e9, 12.5e9)
ELEMENTS = 200_000
WITHIN = 0.05


@dataclass(frozen=True)
class Cost:
    """What a number of teams costs: messages one after the other, and bytes on the way that takes longest."""

    teams: int
    rounds: float
    bytes: float

    def seconds(self, latency: float, rate: float) -> float:
        return self.rounds * latency + self.bytes / rate


@dataclass(frozen=True)
class Judged:
    """On one network: what the best, the rule and two teams take."""

    workers: int
    density: float
    latency: float
    rate: float
    best: Cost
    chosen: Cost
    two: Cost

    @property
    def lost(self) -> float:
        """What the rule takes longer than the best, as a share."""
        return self.chosen.seconds(self.latency, self.rate) / self.best.seconds(self.latency, self.rate) - 1

    @property
    def lost_by_two(self) -> float:
        return self.two.seconds(self.latency, self.rate) / self.best.seconds(self.latency, self.rate) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=_numbers, default=WORKERS, metavar="N,N")
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        judged
        for workers, density in itertools.product(options.workers, DENSITIES)
        for judged in judge(workers, density)
    ]
    show(found)
    print(f"rounds and bytes make the simulated time to within {100 * largest_deviation():.2f} %.")
    if options.picture:
        draw(found).savefig(options.picture, dpi=150)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def judge(workers: int, density: float) -> list[Judged]:
    """The rule on all networks."""
    costs = {teams: cost(workers, teams, density) for teams in powers(workers)}
    entries = round(density * ELEMENTS)
    found = []
    for latency, rate in itertools.product(LATENCIES, RATES):
        best = min(costs.values(), key=lambda each: each.seconds(latency, rate))
        teams = best_teams(workers, entries, density, per_round=latency, per_byte=1 / rate)
        found.append(Judged(workers, density, latency, rate, best, costs[teams], costs[2]))
    return found


def cost(workers: int, teams: int, density: float) -> Cost:
    """Of one step."""
    config = SyncConfig(density=density, teams=teams, dense_below=0)
    found = _simulated(workers, config, bandwidth=1.0)
    return Cost(teams, found.rounds, found.time_s)


def powers(workers: int) -> list[int]:
    """Numbers of teams that agree by R-SAG."""
    return [teams for teams in team_counts(workers) if is_power_of_two(teams)]


def _simulated(workers: int, config: SyncConfig, **more: Any) -> SimulationReport:
    return simulate(workers=workers, elements=ELEMENTS, config=config, **more)


def largest_deviation() -> float:
    """By how much rounds and bytes miss a simulation with latency and rate, at most."""
    workers, density, found = 24, 0.01, []
    for teams, (latency, rate) in itertools.product((1, 2, 8), ((1e-4, 1.25e6), (1e-3, 1.25e6), (1e-3, 12.5e6))):
        config = SyncConfig(density=density, teams=teams, dense_below=0)
        both = _simulated(workers, config, latency=latency, bandwidth=rate).time_s
        found.append(abs(cost(workers, teams, density).seconds(latency, rate) / both - 1))
    return max(found)


def show(found: Sequence[Judged]) -> None:
    rows = []
    for workers in dict.fromkeys(each.workers for each in found):
        own = [each for each in found if each.workers == workers]
        rows.append(
            (
                f"{workers}",
                ", ".join(str(teams) for teams in sorted({each.best.teams for each in own})),
                f"{100 * statistics.mean(each.lost for each in own):.2f} %",
                f"{100 * max(each.lost for each in own):.1f} %",
                f"{100 * statistics.mean(each.lost_by_two for each in own):.1f} %",
                f"{100 * max(each.lost_by_two for each in own):.0f} %",
            )
        )
    columns = ("workers", "best somewhere", "rule: mean loss", "most", "two teams: mean loss", "most")
    within = sum(each.lost <= WITHIN for each in found) / len(found)
    table(
        f"{len(found):,} networks: what a step takes longer than with the best number of teams",
        columns,
        rows,
        note=f"the rule is within {100 * WITHIN:.0f} % of the best on {100 * within:.1f} % of the networks.",
    )


def draw(found: Sequence[Judged]) -> "Figure":
    """The best number of teams over what a round costs, in times of sending all entries once; and the rule's loss."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from spardl.cli.curves import MARKERS, PALETTE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for place, workers in enumerate((8, 16, 32, 64)):
            own = sorted((each for each in found if each.workers == workers), key=_ratio)
            if own:
                style = {"color": PALETTE[place], "marker": MARKERS[place], "markersize": 4}
                left.plot(
                    [_ratio(each) for each in own], [each.best.teams for each in own], label=f"{workers}", **style
                )
        left.set_xscale("log")
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter("{x:.0f}")
        left.set_xlabel("latency over the time that one team's bytes take")
        left.set_ylabel("best number of teams")
        left.legend(title="workers", frameon=False)
        for name, colour, losses in (
            ("the rule", PALETTE[0], sorted(each.lost for each in found)),
            ("two teams", PALETTE[1], sorted(each.lost_by_two for each in found)),
        ):
            shares = [100 * (place + 1) / len(losses) for place in range(len(losses))]
            right.plot(shares, [100 * loss for loss in losses], color=colour, label=name)
        right.axhline(5, color="grey", linewidth=0.8, linestyle=":")
        right.set_xlabel("share of the networks (%)")
        right.set_ylabel("longer than with the best number (%)")
        right.legend(frameon=False)
    return figure


def _ratio(each: Judged) -> float:
    return each.latency * each.rate / each.two.bytes


if __name__ == "__main__":
    main()
