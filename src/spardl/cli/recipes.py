"""`spardl recipes`."""

import argparse
import dataclasses

from spardl.cli.options import add_json_option
from spardl.cli.output import records, table
from spardl.train.recipes import RECIPES, Recipe

SUMMARY = "list the recipes: model, data and settings that belong together"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser, "one record per recipe")


def run(options: argparse.Namespace) -> int:
    with records(options.json) as write:
        for recipe in RECIPES.values():
            write(dataclasses.asdict(recipe))
    if options.json != "-":
        table(
            "Recipes",
            ("recipe", "what it trains", "measured with", "epochs", "batch", "optimizer"),
            [_row(recipe) for recipe in RECIPES.values()],
            note="batch: examples per worker; `spardl train --recipe NAME`, and any option changes what it names",
            figures=False,
        )
    return 0


def _row(recipe: Recipe) -> tuple[str, ...]:
    settings = recipe.settings
    return (
        recipe.name,
        recipe.summary,
        recipe.paper,
        str(settings.epochs),
        str(settings.batch_size),
        f"{settings.optimizer}, {settings.lr:g}, {settings.schedule}",
    )
