"""What do uneven workers and lines cost, and what wins it back?

    python -m benchmarks.questions.uneven --picture docs/pictures/uneven.png

One of 16 workers computes slower, or has a slower line. Times are those of one step of training, whatever is exchanged.
Fitted steps are those of pace="fitted", and an adaptive density is what the throttle of density="auto" comes to, given
exchanges that take as long as the simulator says.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from spardl.cli.output import as_percent, as_seconds, table
from spardl.integrations.throttle import Throttle
from spardl.simulator.computing import Machine
from spardl.simulator.network import Change, Changed, Network
from spardl.simulator.simulation import simulate
from spardl.simulator.training import Training
from spardl.update import LocalUpdates, fitted_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS, ELEMENTS, ODD = 16, 200_000, 3
LATENCY, RATE = 100e-6, 12.5e6
COMPUTING: dict[str, Any] = {"forward": 20e-3, "backward": 40e-3, "optimizer": 5e-3}
SLOWER = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
EVERY, EXCHANGES = 8, 3
ADJUSTMENTS = 12  # of a density, each by a factor of two at most


@dataclass(frozen=True)
class Way:
    """A way to train, and what a step takes where one worker computes, or one line is, so many times slower."""

    name: str
    worker: Callable[[float], float]
    line: Callable[[float], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {way.name: ([way.worker(x) for x in SLOWER], [way.line(x) for x in SLOWER]) for way in WAYS}
    for place, what in enumerate(("one worker computes slower", "one worker's line is slower")):
        columns = ("a step", *(f"{slower:g}x" for slower in SLOWER))
        table(what, columns, [(name, *map(as_seconds, times[place])) for name, times in found.items()])
    shares = ", ".join(f"{as_percent(throttled(line))} at {line:g}x" for line in SLOWER)
    print(f"The adaptive density, by how much slower the line is: {shares}.")
    if options.picture:
        draw(found).savefig(options.picture, dpi=150)


def gradients(density: float, pieces: int = 1) -> Way:
    training = Training(**COMPUTING, pieces=pieces)
    name = f"gradients, {100 * density:g} %"

    def seconds(worker: float, line: float) -> float:
        return _simulated(training, density, worker, line)

    return Way(name, lambda slower: seconds(slower, 1.0), lambda slower: seconds(1.0, slower))


def updates(delay: int, *, fitted: bool, name: str) -> Way:
    rule = LocalUpdates(every=EVERY, delay=delay)

    def seconds(worker: float, line: float) -> float:
        slower = [worker if rank == ODD else 1.0 for rank in range(WORKERS)]
        steps = dict(enumerate(fitted_steps(EVERY, slower))) if fitted else {}
        return _simulated(Training(**COMPUTING, update=rule, local_steps=steps), 0.01, worker, line) / EVERY

    return Way(name, lambda slower: seconds(slower, 1.0), lambda slower: seconds(1.0, slower))


def adaptive(name: str) -> Way:
    rule = LocalUpdates(every=EVERY, delay=1)

    def seconds(worker: float, line: float) -> float:
        density = throttled(line)
        return _simulated(Training(**COMPUTING, update=rule), density, worker, line) / EVERY

    return Way(name, lambda slower: seconds(slower, 1.0), lambda slower: seconds(1.0, slower))


@cache
def throttled(line: float) -> float:
    """The density that the throttle settles at: what the slowest line carries while a step is computed."""
    throttle = Throttle(*LocalUpdates().density_limits)
    for _ in range(ADJUSTMENTS):
        took = _simulated(Training(), throttle.density, 1.0, line)
        throttle.apply(Training(**COMPUTING).seconds / took)
    return throttle.density


def _simulated(training: Training, density: float, worker: float, line: float) -> float:
    """Seconds from one exchange to the next."""
    network = Changed(
        Network.switch(WORKERS, latency=LATENCY, bandwidth=RATE), [Change(f"worker {ODD} *", slower=line)]
    )
    machine = Machine(slower={ODD: worker})
    return simulate(
        workers=WORKERS,
        elements=ELEMENTS,
        density=density,
        network=network,
        machine=machine,
        training=training,
        steps=EXCHANGES,
    ).time_s


WAYS = (
    gradients(0.01),
    gradients(0.001),
    updates(0, fitted=False, name=f"local updates, every {EVERY}"),
    updates(1, fitted=True, name=f"local updates, every {EVERY}, fitted steps, delay 1"),
    adaptive(f"local updates, every {EVERY}, adaptive density, delay 1"),
)


def draw(found: dict[str, tuple[list[float], list[float]]]) -> "Figure":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from spardl.cli.curves import MARKERS, PALETTE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for side, (axes, what) in enumerate(zip(panels, ("worker computes", "worker's line is"), strict=True)):
            for place, (name, times) in enumerate(found.items()):
                style = {"color": PALETTE[place], "marker": MARKERS[place]}
                axes.plot(SLOWER, [1e3 * time for time in times[side]], label=name, markersize=5, **style)
            axes.set_xscale("log")
            axes.set_yscale("log" if side == 0 else "linear")
            axes.set_xticks(SLOWER, [f"{slower:g}x" for slower in SLOWER])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:.0f}")
            axes.set_xlabel(f"one {what} slower")
        panels[0].set_ylabel("one step (ms)")
        panels[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
