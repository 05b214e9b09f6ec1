"""How does the density change what global residual collection is worth?

    python -m benchmarks.questions.residuals --data mnist-folder          # hours of one core; what is there is kept
    python -m benchmarks.questions.residuals --show --picture docs/pictures/residuals.png

Eight workers train a small network on MNIST by SparDL, under each of the four residual policies at each density, from
several seeds. They are simulated in one process: the product's own steps, memory and frames, on real gradients. Every
run is a line in the file of records; runs that stand there are not made again.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.functional import cross_entropy, linear

from spardl.cli.output import as_percent, table
from spardl.config import SyncConfig
from spardl.memory.residuals import POLICIES
from spardl.memory.velocity import Momentum
from spardl.simulator.cluster import VECTOR, SimulatedCluster
from spardl.train.data.idx import mnist

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS, BATCH, STEPS = 8, 8, 500
RATE, MOMENTUM = 0.05, 0.9
WIDTHS = (784, 256, 10)
DENSITIES = (0.1, 0.01, 0.001, 0.0001)
SEEDS = (0, 1, 2)
READ_EVERY = 25  # steps from one reading of the training loss to the next
LAST = 125  # steps whose mean loss is what a run has come to
DENSE = "dense"
RECORDS = Path("benchmarks/results/residuals.json")


@dataclass(frozen=True)
class Run:
    """One training. `losses` are means over all workers and over `READ_EVERY` steps."""

    policy: str
    density: float
    seed: int
    steps: int
    losses: list[float]

    @property
    def loss(self) -> float:
        """At the end."""
        return statistics.mean(self.losses[-max(1, LAST // READ_EVERY) :])

    def steps_to(self, loss: float) -> int | None:
        """Steps until the training loss of a reading, and of the one after it, is as low."""
        for place, pair in enumerate(itertools.pairwise(self.losses)):
            if max(pair) <= loss:
                return (place + 1) * READ_EVERY
        return None


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examples:
    """Images as rows of floats, and their classes."""

    images: Tensor
    labels: Tensor

    def dealt(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch for each worker."""
        chosen = torch.randint(len(self.labels), (WORKERS, BATCH), generator=generator)
        return self.images[chosen], self.labels[chosen]


def load(folder: Path | None) -> Examples:
    """The training part of MNIST."""
    part = mnist(folder).train
    images, labels = part.fetch(torch.arange(len(part)), torch.Generator())
    return Examples(images.flatten(1), labels)


def begin(seed: int) -> Tensor:
    """The weights of a network as one vector, as `torch.nn.Linear` draws them."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(WIDTHS)]
    return torch.cat([each.detach().flatten() for layer in layers for each in (layer.weight, layer.bias)])


def scores(weights: Tensor, images: Tensor) -> Tensor:
    """What the network makes of these images."""
    first = 0
    for inputs, outputs in itertools.pairwise(WIDTHS):
        if first:
            images = images.relu()
        matrix = weights[first : first + inputs * outputs].view(outputs, inputs)
        first += inputs * outputs
        images = linear(images, matrix, weights[first : first + outputs])
        first += outputs
    return images


def _loss(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores(weights, images), labels)


gradients_of = vmap(grad_and_value(_loss), in_dims=(None, 0, 0))


def train(policy: str, density: float, seed: int, examples: Examples, steps: int) -> Run:
    """Train once; with the policy `dense`, everything is sent."""
    weights, generator = begin(seed), torch.Generator().manual_seed(seed)
    how: dict[str, Any] = {"method": DENSE} if policy == DENSE else {"density": density, "residuals": policy}
    cluster = SimulatedCluster(WORKERS, weights.numel(), SyncConfig(values="fp32", **how), momentum=True)
    rule = {VECTOR: Momentum(weights, momentum=MOMENTUM, decay=0.0)}
    losses: list[float] = []
    for _ in range(steps):
        gradients, loss = gradients_of(weights, *examples.dealt(generator))
        mean = cluster.step_all([{VECTOR: each} for each in gradients], [rule] * WORKERS)[0][VECTOR]
        weights.sub_(mean, alpha=RATE)
        losses.append(float(loss.mean()))
    readings = [statistics.mean(losses[first : first + READ_EVERY]) for first in range(0, steps, READ_EVERY)]
    return Run(policy, density, seed, steps, readings)


# --- all of them ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="where MNIST lies; it is not downloaded")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="N")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE", help="one run a line")
    parser.add_argument("--show", action="store_true", help="only what was recorded")
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.show:
        make(options.records, options.data, options.seeds)
    runs = read(options.records)
    show(runs)
    if options.picture:
        draw(runs).savefig(options.picture, dpi=150)


def wanted(seeds: Sequence[int]) -> Iterator[tuple[str, float, int]]:
    """Seed by seed, so that whatever is there can be compared."""
    for seed in seeds:
        yield DENSE, 1.0, seed
        for density in reversed(DENSITIES):  # few entries first: many take longer
            for policy in POLICIES:
                yield policy, density, seed


def make(records: Path, folder: Path | None, seeds: Sequence[int]) -> None:
    """Train whatever is not there yet."""
    examples = load(folder)
    for setting in wanted(seeds):
        if setting not in {(run.policy, run.density, run.seed) for run in read(records)}:
            run = train(*setting, examples, STEPS)
            with records.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")


def read(records: Path) -> list[Run]:
    """All runs that were recorded."""
    lines = records.read_text().splitlines() if records.exists() else []
    return [Run(**json.loads(line)) for line in lines]


# --- what came of it --------------------------------------------------------------------------------------------------


def of(runs: Sequence[Run], policy: str, density: float) -> list[Run]:
    return [run for run in runs if run.policy == policy and run.density == density]


def show(runs: Sequence[Run]) -> None:
    """What each setting has come to: mean and, over seeds, standard deviation; paired differences from carry."""
    rows = [_row(DENSE, 1.0, runs)]
    rows += [_row(policy, density, runs) for density in DENSITIES for policy in POLICIES]
    columns = (
        "residuals",
        "density",
        "runs",
        "training loss",
        "beyond carry's",
        "steps to carry's end",
    )
    table(
        f"{WORKERS} workers, SparDL, MNIST, {STEPS:,} steps",
        columns,
        [row for row in rows if row is not None],
        note="beyond carry: mean and standard deviation of the differences, seed by seed. Steps: until the training"
        " loss is what carry ended with, from the same seed; > where a run did not come there.",
    )


def _row(policy: str, density: float, runs: Sequence[Run]) -> tuple[str, ...] | None:
    own = of(runs, policy, density)
    if not own:
        return None
    carried = {run.seed: run for run in of(runs, "carry", density)}
    beyond = [run.loss - carried[run.seed].loss for run in own if run.seed in carried]
    counts = [run.steps_to(carried[run.seed].loss) for run in own if run.seed in carried]
    is_rival = policy not in (DENSE, "carry")
    return (
        policy,
        as_percent(density),
        f"{len(own)}",
        _spread([run.loss for run in own], "{:.4f}"),
        _spread(beyond, "{:+.4f}") if is_rival else "",
        _steps(counts) if policy != DENSE else "",
    )


def _spread(values: Sequence[float], form: str) -> str:
    text = form.format(statistics.mean(values)) if values else "-"
    return f"{text} ± {form.replace('+', '').format(statistics.stdev(values))}" if len(values) > 1 else text


def _steps(counts: Sequence[int | None]) -> str:
    there = [count for count in counts if count is not None]
    if len(there) < len(counts):
        return f"> {STEPS:,} in {len(counts) - len(there)} of {len(counts)}"
    return f"{statistics.mean(there):,.0f}" if there else "-"


def draw(runs: Sequence[Run]) -> "Figure":
    """Training loss over steps, a panel per density; the band is from the lowest to the highest seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from spardl.cli.curves import INK, PALETTE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        panels = figure.subplots(1, len(DENSITIES), sharey=True)
        for axes, density in zip(panels, DENSITIES, strict=True):
            shown = [(DENSE, 1.0, INK), *((policy, density, PALETTE[at]) for at, policy in enumerate(POLICIES))]
            for policy, share, colour in shown:
                curves = [_smooth(run.losses) for run in of(runs, policy, share)]
                if curves:
                    steps = [READ_EVERY * (place + 1) for place in range(len(curves[0]))]
                    columns = list(zip(*curves, strict=True))
                    axes.plot(steps, [*map(statistics.mean, columns)], color=colour, label=policy, linewidth=1.4)
                    lows, highs = [*map(min, columns)], [*map(max, columns)]
                    axes.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
            axes.set_yscale("log")
            axes.set_title(as_percent(density))
            axes.set_xlabel("steps")
        panels[0].set_ylabel("training loss")
        panels[0].legend(frameon=False)
    return figure


def _smooth(losses: Sequence[float], window: int = 5) -> list[float]:
    return [statistics.mean(losses[max(0, place - window + 1) : place + 1]) for place in range(len(losses))]


if __name__ == "__main__":
    main()
