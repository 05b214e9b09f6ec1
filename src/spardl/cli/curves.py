"""`spardl compare --pictures`: the metric against steps, training time and bytes sent, one curve per method."""

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spardl.cli.options import AUTO
from spardl.cli.output import SHARES, as_bytes, check_target
from spardl.cli.plot import check_drawing
from spardl.collectives.methods.registry import method_class
from spardl.errors import ConfigError
from spardl.train.report import TrainReport
from spardl.train.rivals import DENSE_RIVALS, RIVALS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVER_STEPS, OVER_TIME, OVER_BYTES = "metric-over-steps", "metric-over-time", "metric-over-bytes"
PICTURES = (OVER_STEPS, OVER_TIME, OVER_BYTES)

# Text and axes, and the dense run. A page puts its own colour of text in this one's place.
INK = "#1b1e22"
# By Okabe and Ito: told apart by readers of any colour vision. Seven markers, so that 42 methods look different.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}
LINE, HANDLE = 70, 8  # letters that fit under a picture, and what the sample of a line takes of them
TIMES = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True)
class Point:
    """A test: the metric, and what this worker had spent by then."""

    step: int
    seconds: float
    bytes_sent: float
    score: float


@dataclass(frozen=True)
class Curve:
    """One method at one density under one update rule: its runs, one per seed."""

    label: str
    runs: list[TrainReport]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def way(self) -> str:
        """The method and the update rule."""
        return self.runs[0].way

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.runs[0].settings.lr

    def mean(self, figure: Callable[[TrainReport], float]) -> float:
        return mean_of([figure(run) for run in self.runs])

    def times_to(self, goals: "Curve") -> list[float | None]:
        """By seed, the training time until the run was as good as `goals` ended from that seed; None: never."""
        return [run.seconds_to(goal.score) for run, goal in zip(self.runs, goals.runs, strict=True)]

    def middle(self) -> list[Point]:
        """The mean over the seeds, test by test."""
        together = zip(*(points(run) for run in self.runs), strict=True)
        return [
            Point(
                step=same[0].step,
                seconds=mean_of([point.seconds for point in same]),
                bytes_sent=mean_of([point.bytes_sent for point in same]),
                score=mean_of([point.score for point in same]),
            )
            for same in together
        ]


def points(run: TrainReport) -> list[Point]:
    """Every test of a run, in the order of the steps."""
    scores = [reading.figures[run.metric] for reading in run.readings]
    return [
        Point(reading.step, reading.seconds, reading.bytes_sent, score if math.isfinite(score) else math.nan)
        for reading, score in zip(run.readings, scores, strict=True)
    ]


def mean_of(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def is_dense(method: str) -> bool:
    if method in RIVALS:
        return method in DENSE_RIVALS
    return method != AUTO and method_class(method).about.dense


def reference(curves: Sequence[Curve]) -> Curve | None:
    """What the others are measured against: DDP as it is, dense, or else the first method that sends all gradients."""
    dense = [curve for curve in curves if is_dense(curve.method) and curve.runs[0].rule is None]
    return min(dense, key=lambda curve: (curve.method != "ddp", curve.method != "dense"), default=None)


def best_of(curves: Sequence[Curve]) -> Curve:
    """Of the same way at several learning rates, the one that ended best, over all seeds."""

    def rank(curve: Curve) -> float:
        score = curve.mean(lambda run: run.score)
        higher = score if curve.runs[0].better == "higher" else -score
        return higher if math.isfinite(score) else -math.inf

    return max(curves, key=rank)


# --- files ----------------------------------------------------------------------------------------------------------


def check_pictures(folder: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    if folder is None:
        return
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise ConfigError(f"cannot put pictures into {folder}: {nearest} is a file; name a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot put pictures into {folder}: permission denied.")
    for name in PICTURES if folder.is_dir() else ():
        check_target(str(folder / f"{name}.png"))
    check_drawing()


def save_pictures(curves: Sequence[Curve], folder: Path) -> None:
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    first = curves[0].runs[0]
    with rc_context(STYLE):
        for name in PICTURES:
            figure = draw(curves, name)
            figure.suptitle(f"{first.recipe}, {first.workers} workers", fontsize="medium")
            figure.savefig(folder / f"{name}.png", dpi=200)


def as_svg(curves: Sequence[Curve], name: str) -> str:
    """One of the pictures, without a date or anything else that differs from drawing to drawing."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw(curves, name).savefig(text, format="svg", transparent=True, metadata=nothing)
    return text.getvalue()


# --- drawing --------------------------------------------------------------------------------------------------------


def draw(curves: Sequence[Curve], name: str) -> "Figure":
    """A picture of these curves over the axis of this name."""
    from matplotlib.figure import Figure

    # Narrow, so that its letters can still be read where it is shrunk to the width of a phone.
    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    axes = figure.subplots()
    dense = reference(curves)
    if name == OVER_STEPS:
        _draw_curves(axes, curves, dense, lambda point: point.step)
        axes.set_xlim(left=0)
        axes.set_xlabel("steps")
    elif name == OVER_TIME:
        unit, size = _unit(max(run.seconds for curve in curves for run in curve.runs))
        _draw_curves(axes, curves, dense, lambda point: point.seconds / size)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"training time in {unit}")
    else:
        _draw_curves(axes, curves, dense, lambda point: point.bytes_sent)
        _scale_bytes(axes, [point.bytes_sent for point in _drawn(curves)])
        axes.set_xlabel("sent per worker")
    _scale_scores(axes, curves)
    axes.grid(alpha=0.2, color=INK, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=_columns(curves), frameon=False)
    return figure


def _columns(curves: Sequence[Curve]) -> int:
    """How many labels of the longest one's length fit side by side under a picture; three at most."""
    longest = max(len(curve.label) for curve in curves)
    return max(1, min(3, len(curves), LINE // (longest + HANDLE)))


def _draw_curves(axes: "Axes", curves: Sequence[Curve], dense: Curve | None, over: Callable[[Point], float]) -> None:
    styles = _styles(curves, dense)
    if dense is not None:
        goal = dense.mean(lambda run: run.score)
        if math.isfinite(goal):
            axes.axhline(goal, color=INK, linewidth=0.8, linestyle=(0, (1, 3)), alpha=0.7)
    # Dense first, so that it lies below the others.
    for curve in sorted(curves, key=lambda curve: curve is not dense):
        style = styles[curve.label]
        middle = curve.middle()
        axes.plot(
            [over(point) for point in middle],
            [point.score for point in middle],
            label=curve.label,
            linewidth=1.8,
            markersize=4,
            **style,
        )
        for run in curve.runs if len(curve.runs) > 1 else ():
            found = points(run)
            thin = {**style, "marker": "" if len(found) > 1 else style["marker"]}
            xs, ys = [over(point) for point in found], [point.score for point in found]
            axes.plot(xs, ys, linewidth=0.7, markersize=2, alpha=0.6, **thin)


def _styles(curves: Sequence[Curve], dense: Curve | None) -> dict[str, dict[str, Any]]:
    """By label. A method has its colour and marker under each rule, and each of its densities a kind of line."""
    looks = {dense.way: (INK, "o")} if dense is not None else {}
    ways = [curve.way for curve in curves if curve.way not in looks]
    for number, way in enumerate(dict.fromkeys(ways)):
        looks[way] = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    styles: dict[str, dict[str, Any]] = {}
    seen: list[str] = []
    for curve in curves:
        colour, marker = looks[curve.way]
        line = LINES[seen.count(curve.way) % len(LINES)]
        styles[curve.label] = {"color": colour, "marker": marker, "linestyle": line}
        seen.append(curve.way)
    return styles


def _scale_bytes(axes: "Axes", counts: list[float]) -> None:
    """Make the axis of bytes logarithmic, unless nothing was sent, as by a single worker."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not counts or min(counts) <= 0:
        axes.set_xticks([0], ["0 B"])
        return
    axes.set_xscale("log")
    # Where there is room, 2 and 5 have their own figures.
    decades = math.log10(max(counts) / min(counts))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.5 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: as_bytes(count)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _scale_scores(axes: "Axes", curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import PercentFormatter, ScalarFormatter

    metric = curves[0].runs[0].metric
    axes.set_ylabel(f"test {metric}")
    scores = [point.score for point in _drawn(curves)]
    if metric.partition("@")[0] in SHARES:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=" %"))
    elif scores and min(scores) > 0 and max(scores) > 10 * min(scores):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())


def _drawn(curves: Sequence[Curve]) -> list[Point]:
    """All points that can be seen."""
    found = (point for curve in curves for run in curve.runs for point in points(run))
    return [point for point in found if math.isfinite(point.score)]


def _unit(seconds: float) -> tuple[str, float]:
    return next(((unit, size) for unit, size in TIMES if seconds >= 3 * size), TIMES[-1])
