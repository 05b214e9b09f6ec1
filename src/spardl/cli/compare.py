"""`spardl compare`."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spardl.cli.curves import Curve, best_of, check_pictures, is_dense, save_pictures
from spardl.cli.goals import how_soon
from spardl.cli.options import (
    AUTO,
    DEFAULTS,
    add_model_options,
    add_sync_options,
    add_worker_options,
    method_list,
    sync_config,
    sync_configs,
)
from spardl.cli.output import as_percent, records, table
from spardl.cli.page import check_page, write_page
from spardl.cli.parser import Numbers
from spardl.cli.progress import observer
from spardl.cli.ranks import run_on_ranks
from spardl.cli.summary import summarise
from spardl.cli.training import add_recipe_options, chosen_recipe
from spardl.cli.updates import add_several_update_options, chosen_update, chosen_updates
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigError
from spardl.launch.place import Place
from spardl.train.recipes import Recipe
from spardl.train.report import Observer, Outline, Several
from spardl.train.rivals import RIVALS, check_rivals
from spardl.update import GRADIENTS, LocalUpdates

SUMMARY = "train the same recipe under several methods: metric, bytes and time side by side"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_options(parser)
    add_comparison_options(parser)
    add_worker_options(parser)
    add_sync_options(parser, several_methods=True)
    add_model_options(parser)
    add_several_update_options(parser)


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "what to compare", "Beside --methods and --updates. The runs come one after another."
    )
    add = group.add_argument
    densities = "run each sparse method at each of these densities, instead of --density"
    add("--densities", type=Numbers("0.01,0.001"), metavar="D,D,...", help=densities)
    rates = "run all of it at each of these learning rates; of each method, the rate with the best end counts"
    add("--lrs", type=Numbers("0.002,0.004"), metavar="R,R,...", help=rates)
    rivals = f"train with these too, without us: {', '.join(RIVALS)}; torch's own, separated by commas"
    add("--rivals", default="", metavar="NAMES", help=rivals)
    seeds = "run all of it from each of these seeds; the table then has means and standard deviations"
    add("--seeds", type=_Seeds("0,1"), metavar="N,N,...", help=seeds)
    pictures = "draw the metric over steps, time and bytes sent, as metric-over-steps.png and so on"
    add("--pictures", type=Path, metavar="DIR", help=pictures)
    add("--page", metavar="FILE", help="write table, pictures and settings as one .html file, for any browser")


def run(options: argparse.Namespace) -> int:
    # What cannot work is refused before any worker starts.
    entries, recipes = chosen_entries(options), chosen_recipes(options)
    check_pictures(options.pictures)
    check_page(options.page)

    def work(place: Place) -> None:
        from spardl.train.loop import train

        rates = rates_of(recipes)
        curves = {entry.label: {rate: Curve(entry.label, []) for rate in rates} for entry in entries}
        with records(options.json if place.rank == 0 else None) as write, observer(place.rank) as watcher:
            # Seed by seed, so that a machine's good and bad hours fall to all methods.
            for recipe in recipes:
                for entry in entries:
                    titled = Titled(title_of(entry, recipe, recipes), watcher)
                    report = train(
                        recipe,
                        entry.config,
                        rule=entry.rule,
                        rival=entry.rival,
                        chooses=entry.chooses,
                        data_dir=options.data_dir,
                        observer=titled,
                    )
                    write({"label": entry.label, "seed": recipe.settings.seed, **report.to_dict()})
                    curves[entry.label][recipe.settings.lr].runs.append(report)
        if place.rank == 0:
            deliver([best_of(list(of_entry.values())) for of_entry in curves.values()], rates, options)

    return run_on_ranks(options, [entry.config for entry in entries], work)


def deliver(curves: Sequence[Curve], rates: Sequence[float], options: argparse.Namespace) -> None:
    soon = how_soon(curves)
    tables = [summarise(curves, rates), *([soon] if soon is not None else [])]
    for number, each in enumerate(tables if options.json != "-" else []):
        print(end="\n" if number else "")
        table(each.title, each.columns, each.rows, note="\n".join(each.notes))
    if options.pictures is not None:
        save_pictures(curves, options.pictures)
    if options.page is not None:
        write_page(options.page, tables, curves, options.arguments)


# --- what is run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A way to synchronise that takes part; `chooses`: by the method that is measured to be quickest."""

    label: str
    config: SyncConfig
    rule: LocalUpdates | None = None
    rival: str | None = None
    chooses: bool = False


def chosen_entries(options: argparse.Namespace) -> list[Entry]:
    """Each method, a sparse one at each density and under each update rule, in the order in which they were named."""
    names, updates = method_list(options), chosen_updates(options)
    stand_in = DEFAULTS["method"]
    configs = sync_configs(options, [stand_in if name == AUTO else name for name in names])
    to_choose = sync_config(options, stand_in, others=True) if AUTO in names else None
    if to_choose is not None and stand_in not in names:
        configs = [config for config in configs if config.method != stand_in]
    if options.densities is not None and not options.densities:
        raise ConfigError("--densities names no density; write it as 0.01,0.001.")
    if options.densities is not None and options.density != DEFAULTS["density"]:
        raise ConfigError("give --density or --densities, not both.")
    if updates != [GRADIENTS] and not to_choose and all(is_dense(config.method) for config in configs):
        raise ConfigError("--updates are for sparse methods, and --methods names none; add spardl there.")
    found: dict[str, Entry] = {}
    for config in configs:
        for entry in _entries(config, updates, options):
            # A published way that sends everything is the same under every method.
            found.setdefault(entry.label, entry)
    for entry in _entries(to_choose, updates, options) if to_choose else []:
        if entry.label.startswith(stand_in):  # and is no published way, which has chosen already
            label = AUTO + entry.label.removeprefix(stand_in)
            found[label] = dataclasses.replace(entry, label=label, chooses=True)
    return [*chosen_rivals(options), *found.values()]


def chosen_rivals(options: argparse.Namespace) -> list[Entry]:
    """Who trains without us; none of the settings of synchronisation is about them."""
    names = check_rivals([name.strip() for name in options.rivals.split(",") if name.strip()])
    return [Entry(name, SyncConfig(method="dense", timeout=options.timeout), rival=name) for name in names]


def _entries(config: SyncConfig, updates: Sequence[str], options: argparse.Namespace) -> list[Entry]:
    if is_dense(config.method):
        return [Entry(config.method, config)]
    asked = [config] if options.densities is None else [_at(config, each) for each in dict.fromkeys(options.densities)]
    return [_entry(at, update, updates, options) for at in asked for update in updates]


def _entry(config: SyncConfig, update: str, updates: Sequence[str], options: argparse.Namespace) -> Entry:
    rule, under = chosen_update(options, update, config, others=len(updates) > 1)
    several = list(updates) != [GRADIENTS]
    if under != config:  # by settings that a published way brings along, whatever the method
        return Entry(update, under, rule)
    density = f" {as_percent(config.schedule.target)}" if several or options.densities is not None else ""
    return Entry(config.method + density + (f", {update}" if several else ""), config, rule)


def _at(config: SyncConfig, density: float) -> SyncConfig:
    asked = config.density
    if isinstance(asked, DensitySchedule):
        return dataclasses.replace(config, density=dataclasses.replace(asked, target=density))
    return dataclasses.replace(config, density=density)


def chosen_recipes(options: argparse.Namespace) -> list[Recipe]:
    """The recipe once per seed and learning rate."""
    seeds = chosen_seeds(options)
    if options.lrs is None:
        return seeds
    if not options.lrs:
        raise ConfigError("--lrs names no learning rate; write it as 0.002,0.004.")
    if options.lr is not None:
        raise ConfigError("give --lr or --lrs, not both.")
    return [recipe.changed(lr=rate) for recipe in seeds for rate in dict.fromkeys(options.lrs)]


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


def rates_of(recipes: Sequence[Recipe]) -> list[float]:
    """The learning rates at which each way is run."""
    return list(dict.fromkeys(recipe.settings.lr for recipe in recipes))


def title_of(entry: Entry, recipe: Recipe, recipes: Sequence[Recipe]) -> str:
    """The label, and what else tells this run from the others."""
    rate = f", lr {recipe.settings.lr:g}" if len(rates_of(recipes)) > 1 else ""
    seeds = {each.settings.seed for each in recipes}
    return entry.label + rate + (f", seed {recipe.settings.seed}" if len(seeds) > 1 else "")


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
