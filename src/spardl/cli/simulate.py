"""`spardl simulate`."""

import argparse

from spardl.cli.options import add_json_option, add_seed_option, add_sync_options, sync_config
from spardl.cli.output import as_bytes, as_percent, as_rate, as_seconds, records, table
from spardl.cli.parser import number_of
from spardl.cli.units import bytes_per_second, seconds

SUMMARY = "run a method on any number of simulated workers: time, rounds and bytes on a given network"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument("--workers", type=number_of("workers"), default=8, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--elements",
        type=number_of("elements"),
        default=1_000_000,
        metavar="N",
        help="length of each worker's gradient (default: %(default)s)",
    )
    group.add_argument("--latency", default="0", metavar="TIME", help="of a message: 50us, 2ms (default: none)")
    group.add_argument(
        "--bandwidth", default="inf", metavar="RATE", help="of a link: 1gbit, 125MB (default: unlimited)"
    )
    group.add_argument("--steps", type=number_of("steps"), default=1, metavar="N", help="default: %(default)s")
    add_seed_option(group, "of the gradients", default=0)
    add_json_option(group, "the record")
    add_sync_options(parser)


def run(options: argparse.Namespace) -> int:
    config = sync_config(options)
    config.check_for(options.workers)
    latency, bandwidth = seconds(options.latency), bytes_per_second(options.bandwidth)
    with records(options.json) as write:
        import torch

        from spardl.simulator.simulation import SimulationReport, simulate

        torch.set_num_threads(1)  # threads that wait for each other at every small operation cost more than they bring

        report: SimulationReport = simulate(
            workers=options.workers,
            elements=options.elements,
            config=config,
            latency=latency,
            bandwidth=bandwidth,
            steps=options.steps,
            seed=options.seed,
        )
        write(report.to_dict())
    if options.json != "-":
        table(
            f"{report.method}: {report.workers} workers in {report.teams} team{'s' if report.teams > 1 else ''}, "
            f"{report.elements:,} elements, {as_seconds(latency)} latency, {as_rate(bandwidth)}",
            ("per step", "most on any rank"),
            [
                ("time on this network", as_seconds(report.time_s)),
                ("rounds", f"{report.rounds}"),
                ("messages", f"{report.messages_max}"),
                ("sent", as_bytes(report.bytes_sent_max)),
                ("bits per entry", f"{report.bits_per_entry:.1f}"),
                ("entries of the result", f"{report.nnz:,} ({as_percent(report.nnz / report.elements)})"),
                ("nothing lost", "yes" if report.conserved else f"NO: {as_percent(report.lost_share)} of gradients"),
            ],
        )
    return 0
