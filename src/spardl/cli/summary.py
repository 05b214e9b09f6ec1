"""What `spardl compare` has found: the table of all ways side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spardl.cli.curves import Curve, mean_of, reference
from spardl.cli.output import as_bytes, as_figure, as_percent, as_ratio, as_seconds


@dataclass(frozen=True)
class Summary:
    """A table as people read it, in the terminal and on the page."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def summarise(curves: Sequence[Curve], rates: Sequence[float] = ()) -> Summary:
    """What each way came to. With several `rates`, curves are those of each way's best."""
    first, dense = curves[0].runs[0], reference(curves)
    columns = [
        ("method", [curve.label for curve in curves]),
        (f"test {first.metric}", [_score(curve) for curve in curves]),
    ]
    if len(rates) > 1:
        columns.append(("learning rate", [f"{curve.rate:g}" for curve in curves]))
    columns.append(("time", [as_seconds(curve.mean(lambda run: run.seconds)) for curve in curves]))
    if dense is not None:
        columns.append(("time to dense's end", [_time_to(curve, dense) for curve in curves]))
        if any(speedups := [_speedup(curve, dense) for curve in curves]):
            columns.append(("speed-up", speedups))
    columns += [
        ("sent", [as_bytes(curve.mean(lambda run: run.costs.bytes_sent)) for curve in curves]),
        ("per step", [as_bytes(curve.mean(lambda run: run.bytes_per_step)) for curve in curves]),
    ]
    if dense is not None:
        columns.append(("against dense", [_saving(curve, dense) for curve in curves]))
    columns.append(("density", [as_percent(curve.mean(lambda run: run.achieved_density)) for curve in curves]))
    names = [name for name, _ in columns]
    return Summary(
        title=f"{first.recipe}: {first.workers} workers, {first.parameters:,} parameters, {first.steps:,} steps",
        columns=names,
        rows=[list(row) for row in zip(*(cells for _, cells in columns), strict=True)],
        notes=_notes(curves, dense, names, rates),
    )


def _notes(curves: Sequence[Curve], dense: Curve | None, columns: Sequence[str], rates: Sequence[float]) -> list[str]:
    """What the columns mean, in their order."""
    first, seeds = curves[0].runs[0], len(curves[0].runs)
    notes = []
    if seeds > 1:
        notes.append(f"test {first.metric}: mean of {seeds} seeds ± standard deviation; other columns: means")
    if len(rates) > 1:
        notes += _notes_on_rates(curves, rates)
    notes.append("time: of training, on this network")
    if dense is not None:
        goal = f"until the test {first.metric} that {dense.label} ended with"
        notes.append(f"time to dense's end: {goal}{', seed by seed' if seeds > 1 else ''}")
    if "speed-up" in columns:
        notes.append("speed-up: of the time to dense's end")
    notes.append("sent: by one worker, rank 0, in all and per step")
    if any(run.rule is not None for curve in curves for run in curve.runs):
        notes.append("local updates: tests see the shared weights; what is left is sent before the last, and counts")
        notes.append("density: of one exchange")
    if first.note:
        notes.append(first.note)
    return notes


def _notes_on_rates(curves: Sequence[Curve], rates: Sequence[float]) -> list[str]:
    """Which were tried, and for whom a better one may lie beyond them."""
    tried = ", ".join(f"{rate:g}" for rate in sorted(rates))
    notes = [f"learning rate: of {tried}, the one with which a method ended best"]
    for word, edge in (("smallest", min(rates)), ("largest", max(rates))):
        at_edge = [curve.label for curve in curves if curve.rate == edge]
        if at_edge:
            notes.append(f"best at the {word} rate that was tried, and perhaps beyond it: {'; '.join(at_edge)}")
    return notes


def _score(curve: Curve) -> str:
    """The mean, and how far seeds are apart: `97.21 ± 0.30 %`."""
    metric, scores = curve.runs[0].metric, [run.score for run in curve.runs]
    if not all(math.isfinite(score) for score in scores):
        return as_figure(metric, math.nan)
    mean, gap, unit = as_figure(metric, mean_of(scores)).partition(" ")
    if len(scores) == 1:
        return mean + gap + unit
    squares = [(score - mean_of(scores)) ** 2 for score in scores]
    deviation = math.sqrt(math.fsum(squares) / (len(scores) - 1)) * (100 if unit == "%" else 1)
    return f"{mean} ± {deviation:.{len(mean.partition('.')[2])}f}{gap}{unit}"


def _time_to(curve: Curve, dense: Curve) -> str:
    """The time to where dense ends: a mean over those seeds from which a method came there."""
    times = curve.times_to(dense)
    reached = [seconds for seconds in times if seconds is not None]
    if not reached:
        return "not reached"
    share = "" if len(reached) == len(times) else f" ({len(reached)} of {len(times)})"
    return as_seconds(mean_of(reached)) + share


def _speedup(curve: Curve, dense: Curve) -> str:
    """How much sooner than dense a method comes to where dense ends, if it does from every seed."""
    mine, theirs = curve.times_to(dense), dense.times_to(dense)
    if curve is dense or None in mine or None in theirs:
        return ""
    return as_ratio(sum(filter(None, theirs)) / (sum(filter(None, mine)) or math.nan))


def _saving(curve: Curve, dense: Curve) -> str:
    mine, theirs = (each.mean(lambda run: run.bytes_per_step) for each in (curve, dense))
    if curve is dense or not (mine and theirs):
        return ""
    more, word = (theirs / mine, "fewer") if theirs >= mine else (mine / theirs, "more")
    return f"{more:.0f}x {word} bytes" if more >= 10 else f"{more:.1f}x {word} bytes"
