"""`spardl compare`."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spardl.cli.curves import Curve, check_pictures, is_dense, mean_of, reference, save_pictures
from spardl.cli.options import DEFAULTS, add_model_options, add_sync_options, add_worker_options, sync_configs
from spardl.cli.output import as_bytes, as_figure, as_percent, as_ratio, as_seconds, records, table
from spardl.cli.page import check_page, write_page
from spardl.cli.parser import Numbers
from spardl.cli.progress import observer
from spardl.cli.ranks import run_on_ranks
from spardl.cli.training import add_recipe_options, chosen_recipe
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigError
from spardl.launch.place import Place
from spardl.train.recipes import Recipe
from spardl.train.report import Observer, Outline, Several

SUMMARY = "train the same recipe under several methods: metric, bytes and time side by side"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_options(parser)
    add_comparison_options(parser)
    add_worker_options(parser)
    add_sync_options(parser, several_methods=True)
    add_model_options(parser)


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to compare", "Beside --methods. The runs come one after another.")
    add = group.add_argument
    densities = "run each sparse method at each of these densities, instead of --density"
    add("--densities", type=Numbers("0.01,0.001"), metavar="D,D,...", help=densities)
    seeds = "run all of it from each of these seeds; the table then has means and standard deviations"
    add("--seeds", type=_Seeds("0,1"), metavar="N,N,...", help=seeds)
    pictures = "draw the metric over time and over bytes sent, as metric-over-time.png and metric-over-bytes.png"
    add("--pictures", type=Path, metavar="DIR", help=pictures)
    add("--page", metavar="FILE", help="write table, pictures and settings as one .html file, for any browser")


def run(options: argparse.Namespace) -> int:
    # What cannot work is refused before any worker starts.
    entries, recipes = chosen_entries(options), chosen_seeds(options)
    check_pictures(options.pictures)
    check_page(options.page)

    def work(place: Place) -> None:
        from spardl.train.loop import train

        curves = [Curve(entry.label, []) for entry in entries]
        with records(options.json if place.rank == 0 else None) as write, observer(place.rank) as watcher:
            # Seed by seed, so that a machine's good and bad hours fall to all methods.
            for recipe in recipes:
                for entry, curve in zip(entries, curves, strict=True):
                    seed = recipe.settings.seed
                    title = entry.label if len(recipes) == 1 else f"{entry.label}, seed {seed}"
                    report = train(recipe, entry.config, data_dir=options.data_dir, observer=Titled(title, watcher))
                    write({"label": entry.label, "seed": seed, **report.to_dict()})
                    curve.runs.append(report)
        if place.rank == 0:
            deliver(curves, options)

    return run_on_ranks(options, [entry.config for entry in entries], work)


def deliver(curves: Sequence[Curve], options: argparse.Namespace) -> None:
    summary = summarise(curves)
    if options.json != "-":
        table(summary.title, summary.columns, summary.rows, note="\n".join(summary.notes))
    if options.pictures is not None:
        save_pictures(curves, options.pictures)
    if options.page is not None:
        write_page(options.page, summary, curves, options.arguments)


# --- what is run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A way to synchronise that takes part."""

    label: str
    config: SyncConfig


def chosen_entries(options: argparse.Namespace) -> list[Entry]:
    """Each method, a sparse one at each density, in the order in which they were named."""
    configs = sync_configs(options)
    if options.densities is None:
        return [Entry(config.method, config) for config in configs]
    if not options.densities:
        raise ConfigError("--densities names no density; write it as 0.01,0.001.")
    if options.density != DEFAULTS["density"]:
        raise ConfigError("give --density or --densities, not both.")
    return [entry for config in configs for entry in _at_each(config, options.densities)]


def _at_each(config: SyncConfig, densities: Sequence[float]) -> list[Entry]:
    if is_dense(config.method):
        return [Entry(config.method, config)]
    return [
        Entry(f"{config.method} {as_percent(density)}", _at(config, density)) for density in dict.fromkeys(densities)
    ]


def _at(config: SyncConfig, density: float) -> SyncConfig:
    asked = config.density
    if isinstance(asked, DensitySchedule):
        return dataclasses.replace(config, density=dataclasses.replace(asked, target=density))
    return dataclasses.replace(config, density=density)


def chosen_seeds(options: argparse.Namespace) -> list[Recipe]:
    """The recipe once per seed."""
    recipe = chosen_recipe(options)
    if options.seeds is None:
        return [recipe]
    if not options.seeds:
        raise ConfigError("--seeds names no seed; write it as 0,1.")
    if options.seed is not None:
        raise ConfigError("give --seed or --seeds, not both.")
    return [recipe.changed(seed=seed) for seed in dict.fromkeys(options.seeds)]


class _Seeds(Numbers):
    def __call__(self, text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of seeds, give whole numbers from 0 on, as 0,1")
        return tuple(int(part) for part in parts)


class Titled(Several):
    """Tells an observer of a run under a title that says more than its method."""

    def __init__(self, title: str, observer: Observer) -> None:
        super().__init__([observer])
        self._title = title

    def begin(self, outline: Outline) -> None:
        super().begin(dataclasses.replace(outline, way=self._title))


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The table as people read it, in the terminal and on the page."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def summarise(curves: Sequence[Curve]) -> Summary:
    first, dense = curves[0].runs[0], reference(curves)
    columns = [
        ("method", [curve.label for curve in curves]),
        (f"test {first.metric}", [_score(curve) for curve in curves]),
        ("time", [as_seconds(curve.mean(lambda run: run.seconds)) for curve in curves]),
    ]
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
        notes=_notes(curves, dense, names),
    )


def _notes(curves: Sequence[Curve], dense: Curve | None, columns: Sequence[str]) -> list[str]:
    """What the columns mean, in their order."""
    first, seeds = curves[0].runs[0], len(curves[0].runs)
    notes = ["time: of training, on this network"]
    if seeds > 1:
        notes.insert(0, f"test {first.metric}: mean of {seeds} seeds ± standard deviation; other columns: means")
    if dense is not None:
        goal = f"until the test {first.metric} that {dense.label} ended with"
        notes.append(f"time to dense's end: {goal}{', seed by seed' if seeds > 1 else ''}")
    if "speed-up" in columns:
        notes.append("speed-up: of the time to dense's end")
    notes.append("sent: by one worker, rank 0, in all and per step")
    if first.note:
        notes.append(first.note)
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
