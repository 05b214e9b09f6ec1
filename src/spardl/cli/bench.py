"""`spardl bench`."""

import argparse
from typing import TYPE_CHECKING

from spardl.cli.options import add_json_option, add_seed_option, add_sync_options, add_worker_options, sync_configs
from spardl.cli.output import as_bytes, as_percent, as_ratio, as_seconds, records, table
from spardl.cli.parser import number_of
from spardl.cli.ranks import run_on_ranks
from spardl.train.place import Place

if TYPE_CHECKING:
    from spardl.train.bench import BenchReport

SUMMARY = "time the synchronisation of one gradient under several methods, side by side in one run"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--elements",
        type=number_of("elements"),
        default=1_000_000,
        metavar="N",
        help="length of the gradient (default: %(default)s)",
    )
    group.add_argument(
        "--repetitions",
        type=number_of("repetitions"),
        default=20,
        metavar="N",
        help="of each method, taking turns (default: %(default)s)",
    )
    group.add_argument(
        "--warmup",
        type=number_of("repetitions", at_least=0),
        default=3,
        metavar="N",
        help="repetitions before the clock counts (default: %(default)s)",
    )
    add_seed_option(group, "of the gradients", default=0)
    add_json_option(group, "one record per method")
    add_worker_options(parser)
    add_sync_options(parser, several_methods=True)


def run(options: argparse.Namespace) -> int:
    configs = sync_configs(options)

    def measure(place: Place) -> None:
        from spardl.train.bench import bench

        with records(options.json if place.rank == 0 else None) as write:
            reports = bench(
                configs,
                elements=options.elements,
                repetitions=options.repetitions,
                warmup=options.warmup,
                seed=options.seed,
            )
            for report in reports:
                write(report.to_dict())
        if place.rank == 0 and options.json != "-":
            show(reports)

    return run_on_ranks(options, configs, measure)


def show(reports: "list[BenchReport]") -> None:
    first, density = reports[0], min(report.density for report in reports)
    table(
        f"One gradient of {first.elements:,} elements at a density of {as_percent(density)}, {first.workers} workers",
        ("method", "median", "middle half", "rounds", "sent", "bits per entry", "against dense"),
        [
            (
                report.method,
                as_seconds(report.median_s),
                as_seconds(*report.quartiles_s),
                str(report.rounds),
                as_bytes(report.bytes_sent),
                f"{report.bits_per_entry:.1f}",
                _against_dense(report),
            )
            for report in reports
        ],
        note=f"{first.repetitions} repetitions each, taking turns; time of the slowest worker, bytes that one sends",
    )


def _against_dense(report: "BenchReport") -> str:
    if report.method == "dense" or report.speedup_vs_dense is None:
        return ""
    return as_ratio(report.speedup_vs_dense)
