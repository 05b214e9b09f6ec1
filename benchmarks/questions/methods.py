"""All methods to 4,096 workers, at 1 % and 0.1 %.

    python -m benchmarks.questions.methods --picture docs/pictures/methods.png

Simulating every method with thousands of workers takes more memory than a machine has: what all of them hold together
grows with the square of their number for some. So lines are each method's own formulas (`spardl methods`), with the
bits per entry that its frames have, and the simulator, which runs the programs themselves, is held against the formulas
wherever it can be: all methods to 32 workers, SparDL to 256.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spardl.cli.output import as_percent, as_seconds, table
from spardl.collectives.methods.registry import method_class
from spardl.config import SyncConfig
from spardl.memory.layout import entries
from spardl.simulator.simulation import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("dense", "spardl", "topka", "topkdsa", "gtopk", "oktopk", "exdyna")
DENSITIES = (0.01, 0.001)
WORKERS = tuple(2**power for power in range(1, 13))
ELEMENTS, LATENCY, RATE = 10_000_000, 50e-6, 125e6
CHECKED = (4, 16, 32)
CHECKED_ELEMENTS = 100_000
SETTLED, TIMED = 4, 1  # steps
BITS = {0.01: 24.3, 0.001: 27.6}  # of an entry in bf16, indices included


@dataclass(frozen=True)
class Check:
    """One simulated setting, and what the formulas say: a range, as some methods' traffic depends on the gradients."""

    method: str
    workers: int
    density: float
    seconds: float
    least: float
    most: float

    @property
    def outside(self) -> float:
        """By what share the simulation lies outside the range."""
        return max(0.0, self.least / self.seconds - 1, self.seconds / self.most - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    show(check())
    if options.picture:
        draw().savefig(options.picture, dpi=150)


def predicted(method: str, workers: int, density: float, elements: int) -> tuple[float, float]:
    """The least and the most seconds of a synchronisation by the formulas."""
    about, teams = method_class(method).about, SyncConfig().teams_of(workers) if method == "spardl" else 1
    terms = {"P": workers, "d": teams, "n": elements, "k": entries(density, elements)}
    bits = 32.0 if about.dense else BITS[density]
    rounds, sent = about.rounds.range(**terms), about.entries.range(**terms)
    if method == "gtopk":  # nobody sends in all of its rounds, but each waits for k entries
        sent = (rounds[0] * terms["k"],) * 2
    least, most = (turns * LATENCY + amount * bits / 8 / RATE for turns, amount in zip(rounds, sent, strict=True))
    return least, most


def check() -> list[Check]:
    """The simulator against the formulas."""
    settings = [*itertools.product(METHODS, CHECKED, DENSITIES), ("spardl", 64, 0.01), ("spardl", 256, 0.01)]
    return [
        Check(method, workers, density, simulated(method, workers, density), *of_checked(method, workers, density))
        for method, workers, density in settings
    ]


def of_checked(method: str, workers: int, density: float) -> tuple[float, float]:
    return predicted(method, workers, density, CHECKED_ELEMENTS)


def simulated(method: str, workers: int, density: float) -> float:
    """Seconds of a settled step."""
    config = SyncConfig(method=method, density=density, dense_below=0)

    def seconds(steps: int) -> float:
        found = simulate(
            workers=workers, elements=CHECKED_ELEMENTS, config=config, latency=LATENCY, bandwidth=RATE, steps=steps
        )
        return found.time_s * steps

    if method in ("dense", "spardl", "topka", "topkdsa", "gtopk"):  # they have nothing to learn
        return seconds(1)
    return (seconds(SETTLED + TIMED) - seconds(SETTLED)) / TIMED


def show(found: Sequence[Check]) -> None:
    rows = [
        (
            each.method,
            f"{each.workers}",
            as_percent(each.density),
            as_seconds(each.seconds),
            as_seconds(each.least, each.most) if each.most > 1.001 * each.least else as_seconds(each.least),
            f"{100 * each.outside:.0f} %",
        )
        for each in found
    ]
    checked = ("method", "workers", "density", "simulated", "by the formula", "outside by")
    table(f"{CHECKED_ELEMENTS:,} elements, 50 us, 1 Gbit/s: the programs against their formulas", checked, rows)
    rows = [
        (method, as_percent(density), *(_told(method, workers, density) for workers in (16, 256, 4096)))
        for density in DENSITIES
        for method in METHODS
    ]
    columns = ("method", "density", "16 workers", "256 workers", "4,096 workers")
    table(f"{ELEMENTS:,} elements, 50 us, 1 Gbit/s", columns, rows)


def _told(method: str, workers: int, density: float) -> str:
    least, most = predicted(method, workers, density, ELEMENTS)
    return as_seconds(least, most) if most > 1.001 * least else as_seconds(least)


def draw() -> "Figure":
    """Seconds over workers, both logarithmic; a band where a method's traffic depends on the gradients."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from spardl.cli.curves import INK, PALETTE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, density in zip(panels, DENSITIES, strict=True):
            for place, method in enumerate(METHODS):
                colour = INK if method == "dense" else PALETTE[(place - 1) % len(PALETTE)]
                ends = [predicted(method, workers, density, ELEMENTS) for workers in WORKERS]
                least, most = zip(*ends, strict=True)
                axes.plot(WORKERS, least, color=colour, label=method, linewidth=2.4 if method == "spardl" else 1.4)
                axes.fill_between(WORKERS, least, most, color=colour, alpha=0.12, linewidth=0)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set_xlabel("workers")
            axes.set_title(f"density {as_percent(density)}", loc="left", fontsize="medium")
        panels[0].set_ylabel("one synchronisation (s)")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper", frameon=False)
    return figure


if __name__ == "__main__":
    main()
