"""`spardl train`."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spardl.cli.options import (
    add_json_option,
    add_model_options,
    add_seed_option,
    add_sync_options,
    add_worker_options,
    sync_config,
)
from spardl.cli.output import as_bytes, as_percent, as_seconds, records, table
from spardl.cli.parser import number_of
from spardl.cli.progress import observer
from spardl.cli.ranks import run_on_ranks
from spardl.config import SyncConfig
from spardl.train.place import Place
from spardl.train.recipes import RECIPES, recipe_named
from spardl.train.settings import SETTINGS, TrainSettings

if TYPE_CHECKING:
    from spardl.train.loop import TrainReport

SUMMARY = "train a recipe with local workers, or as one rank under torchrun"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_options(parser)
    add_worker_options(parser)
    add_sync_options(parser)
    add_model_options(parser)


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training", "Where an option is not given, the recipe's own value counts.")
    listing = ", ".join(f"{recipe.name} ({recipe.summary})" for recipe in RECIPES.values())
    group.add_argument("--recipe", default="digits", metavar="NAME", help=f"{listing}; default: %(default)s")
    group.add_argument("--epochs", type=number_of("epochs"), metavar="N", help="passes over the training data")
    group.add_argument("--batch-size", type=number_of("examples"), metavar="N", help="examples per worker and step")
    group.add_argument("--lr", type=float, metavar="RATE", help="learning rate at the start; falls to 0 along a cosine")
    group.add_argument("--momentum", type=float, metavar="SHARE", help="of SGD")
    group.add_argument("--weight-decay", type=float, metavar="RATE", help="of SGD")
    add_seed_option(group, "of weights and shuffling")
    add_json_option(group, "one record per run")


def train_settings(options: argparse.Namespace) -> TrainSettings:
    """The recipe's settings, with what the options change."""
    given = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    return dataclasses.replace(recipe_named(options.recipe).settings, **given)


def train_each(options: argparse.Namespace, configs: Sequence[SyncConfig], place: Place) -> "list[TrainReport]":
    """Train the recipe once per configuration, on this rank; write the records on rank 0."""
    recipe, settings = recipe_named(options.recipe), train_settings(options)
    from spardl.train.loop import train

    reports = []
    with records(options.json if place.rank == 0 else None) as write, observer(place.rank) as watcher:
        for config in configs:
            report = train(recipe, settings, config, watcher)
            write(report.to_dict())
            reports.append(report)
    return reports


def run(options: argparse.Namespace) -> int:
    config = sync_config(options)
    train_settings(options)  # refuse what cannot work before any worker starts

    def work(place: Place) -> None:
        (report,) = train_each(options, [config], place)
        if place.rank == 0 and options.json != "-":
            show(report)

    return run_on_ranks(options, [config], work)


def show(report: "TrainReport") -> None:
    table(
        f"{report.recipe}, {report.method}: {report.workers} workers, {report.parameters:,} parameters",
        ("", "at the end"),
        [
            ("test accuracy", f"{100 * report.accuracy:.2f} %"),
            ("test loss", f"{report.test_loss:.4f}"),
            ("training loss", f"{report.train_loss:.4f}"),
            ("training time", as_seconds(report.seconds)),
            ("sent per step and worker", as_bytes(report.bytes_per_step)),
            ("achieved density", as_percent(report.achieved_density)),
        ],
    )
