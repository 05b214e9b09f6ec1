"""`--plot`: a run as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from spardl.cli.output import check_target
from spardl.errors import ConfigError
from spardl.extras import require

if TYPE_CHECKING:
    from spardl.train.report import TrainReport

FORMATS = (".png", ".svg", ".pdf")


def check_plot(target: str | None) -> None:
    """Refuse before the work what could not be drawn after it."""
    if target is None:
        return
    if Path(target).suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {target}: give it a name that ends in {', '.join(FORMATS)}.")
    check_target(target)
    check_drawing()


def check_drawing() -> None:
    """Refuse to draw without what draws."""
    require("matplotlib", "pictures are drawn by matplotlib")


def draw_run(report: "TrainReport", target: str) -> None:
    """Training and test loss on the left, the metric on the right, over training time."""
    from matplotlib.figure import Figure

    elapsed, ends = 0.0, []
    for epoch in report.epochs:
        elapsed += epoch.seconds
        ends.append(elapsed)
    tested = [(reading.seconds, reading.figures) for reading in report.readings]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(ends, [epoch.train_loss for epoch in report.epochs], marker=".", label="training")
    left.plot([end for end, _ in tested], [figures["loss"] for _, figures in tested], marker=".", label="test")
    left.legend()
    right.plot([end for end, _ in tested], [figures[report.metric] for _, figures in tested], marker=".", color="C2")
    for axes, name in ((left, "loss"), (right, f"test {report.metric}")):
        axes.set_xlabel("training time in s")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report.recipe}, {report.way}, {report.workers} workers")
    figure.savefig(target, dpi=150)
