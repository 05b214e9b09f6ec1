"""`spardl compare`."""

import argparse
from typing import TYPE_CHECKING

from spardl.cli.options import add_model_options, add_sync_options, add_worker_options, sync_configs
from spardl.cli.output import as_bytes, as_percent, as_seconds, table
from spardl.cli.ranks import run_on_ranks
from spardl.cli.train import add_recipe_options, train_each, train_settings
from spardl.train.place import Place

if TYPE_CHECKING:
    from spardl.train.loop import TrainReport

SUMMARY = "train the same recipe under several methods: accuracy, bytes and time side by side"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_options(parser)
    add_worker_options(parser)
    add_sync_options(parser, several_methods=True)
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    configs = sync_configs(options)
    train_settings(options)  # refuse what cannot work before any worker starts

    def work(place: Place) -> None:
        reports = train_each(options, configs, place)
        if place.rank == 0 and options.json != "-":
            show(reports)

    return run_on_ranks(options, configs, work)


def show(reports: "list[TrainReport]") -> None:
    first = reports[0]
    dense = next((report for report in reports if report.method == "dense"), None)
    table(
        f"{first.recipe}: {first.workers} workers, {first.parameters:,} parameters, {first.steps} steps",
        ("method", "test accuracy", "sent per step", "against dense", "density", "time"),
        [
            (
                report.method,
                f"{100 * report.accuracy:.2f} %",
                as_bytes(report.bytes_per_step),
                _saving(report, dense),
                as_percent(report.achieved_density),
                as_seconds(report.seconds),
            )
            for report in reports
        ],
        note="sent: by each worker; time: of training, on this network",
    )


def _saving(report: "TrainReport", dense: "TrainReport | None") -> str:
    if dense is None or report is dense or not report.bytes_per_step:
        return ""
    return f"{dense.bytes_per_step / report.bytes_per_step:.0f}x fewer bytes"
