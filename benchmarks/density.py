"""How well threshold methods hold their density, step by step, when gradients grow tenfold half-way.

    python -m benchmarks.density --picture docs/pictures/exdyna-density.png

Runs the real programs on simulated workers. A fifth of the coordinates is six times as large as the others.
"""

import argparse

import torch

from spardl.config import SyncConfig
from spardl.simulator.cluster import SimulatedCluster

WAYS = {
    "ExDyna (ours: shared histogram with trend)": SyncConfig(method="exdyna"),
    "ExDyna as published": SyncConfig(method="exdyna", threshold="published", rebalance="neighbour"),
    "Ok-Topk": SyncConfig(method="oktopk"),
    "SparDL": SyncConfig(method="spardl"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--elements", type=int, default=200_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--picture", metavar="FILE", help="where to draw it")
    options = parser.parse_args()
    curves = {title: densities(config, options) for title, config in WAYS.items()}
    for title, curve in curves.items():
        settled = [value / options.density - 1 for value in curve[len(curve) // 4 :]]
        mean, worst = sum(settled) / len(settled), max(settled, key=abs)
        print(f"{title}: mean error {100 * mean:+.1f} %, worst {100 * worst:+.0f} %, after the first quarter")
    if options.picture:
        draw(curves, options)


def densities(config: SyncConfig, options: argparse.Namespace) -> list[float]:
    """Achieved density of each step."""
    cluster = SimulatedCluster(
        options.workers, options.elements, SyncConfig(**{**config.to_dict(), "density": options.density})
    )
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(torch.randn(options.elements, generator=generator))
    scale[: options.elements // 5] *= 6
    curve = []
    for step in range(options.steps):
        if step == options.steps // 2:
            scale *= 10
        noise = [torch.randn(options.elements, generator=generator) for _ in range(options.workers)]
        cluster.step([scale * each for each in noise])
        (group,) = cluster.ranks[0].groups
        curve.append(group.stats.last_entries / options.elements)
    return curve


def draw(curves: dict[str, list[float]], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for (title, curve), colour in zip(curves.items(), ("#3f7f5f", "#c0392b", "#e0a030", "#7d97b5"), strict=True):
        axes.plot([100 * value for value in curve], label=title, color=colour, linewidth=1.3)
    axes.axhline(100 * options.density, color="black", linewidth=0.8, linestyle=":")
    axes.axhspan(90 * options.density, 110 * options.density, color="black", alpha=0.06, linewidth=0)
    axes.set_yscale("log")
    ticks = [100 * options.density * factor for factor in (0.5, 1, 2, 4)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.annotate("gradients x 10", (options.steps / 2 - 2, 1.15 * ticks[0]), ha="right", fontsize=9)
    axes.set_xlabel("step")
    axes.set_ylabel("achieved density (%)")
    axes.set_title(f"{options.workers} workers, target {100 * options.density:g} % (grey: within 10 %)", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
