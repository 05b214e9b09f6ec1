"""`spardl simulate`."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spardl.cli.options import add_json_option, add_seed_option, add_sync_options
from spardl.cli.output import as_bytes, as_percent, as_rate, as_seconds, has_rich, records, table
from spardl.cli.parser import number_of
from spardl.cli.plot import check_plot
from spardl.cli.scenario import Point, points
from spardl.cli.topology import add_network_options
from spardl.cli.units import bytes_per_second, seconds
from spardl.cli.updates import add_update_options

if TYPE_CHECKING:
    from spardl.simulator.simulation import Progress, SimulationReport

SUMMARY = "run a method on up to 4,096 simulated workers on any network: time, rounds, bytes, timelines and sweeps"


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
    group.add_argument("--steps", type=number_of("steps"), default=1, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=A,B,...",
        help="simulate with each of these values of an option: workers=2,4,8; may be repeated, for all combinations",
    )
    group.add_argument(
        "--picture",
        metavar="FILE",
        help="draw a timeline of one run, or the time over what was swept: .png, .svg or .pdf",
    )
    add_json_option(group, "the records")
    add_network_options(parser)
    _add_work_options(parser)
    _add_gradient_options(parser)
    add_update_options(parser)
    add_sync_options(parser)


def _add_work_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("computing")
    for name in ("forward", "backward", "optimizer"):
        group.add_argument(f"--{name}", default="0", metavar="TIME", help="of a step: 20ms (default: none)")
    group.add_argument(
        "--pieces",
        type=number_of("pieces"),
        default=1,
        metavar="N",
        help="exchange the gradient in so many equal parts, each as soon as backward has computed it (default: 1)",
    )
    group.add_argument(
        "--slow-worker",
        action="append",
        default=[],
        metavar="RANK:4x",
        help="a worker that computes so many times slower; may be repeated",
    )
    group.add_argument(
        "--cores", type=number_of("cores"), metavar="N", help="all workers share so many cores (default: one each)"
    )


def _add_gradient_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gradients")
    group.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="what workers' random gradients have in common, 0 (nothing) to 1 (all); default: %(default)s",
    )
    group.add_argument(
        "--gradients", metavar="FILE", help="gradients that `spardl train --record-gradients FILE` has recorded"
    )
    add_seed_option(group, "of the random gradients", default=0)


def run(options: argparse.Namespace) -> int:
    check_plot(options.picture)
    asked = points(options)
    with records(options.json) as write:
        import torch

        torch.set_num_threads(1)  # threads that wait for each other at every small operation cost more than they bring
        found: list[tuple[Point, SimulationReport]] = []
        for number, point in enumerate(asked):
            with _progress(number, len(asked)) as progress:
                report = point.simulate(progress)
            found.append((point, report))
            write({**point.varied_record(), **report.to_dict()})
    if options.picture is not None:
        from spardl.cli.simulation_charts import draw

        draw(found, options.picture)
    if options.json != "-":
        (_show_sweep if options.sweep else _show)(options, found)
    return 0


@contextlib.contextmanager
def _progress(number: int, total: int) -> Iterator["Progress | None"]:
    """A bar on a terminal, if there is one and rich to draw it."""
    if not (sys.stderr.isatty() and has_rich()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    title = "simulating" if total == 1 else f"simulating {number + 1} of {total}"
    columns = (TextColumn(title), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, all_of_it: progress.update(task, completed=done, total=all_of_it)


def _show(options: argparse.Namespace, found: Sequence[tuple[Point, "SimulationReport"]]) -> None:
    ((point, report),) = found
    latency, bandwidth = seconds(point.options.latency), bytes_per_second(point.options.bandwidth)
    teams = f" in {report.teams} teams" if report.teams > 1 else ""
    rows: list[tuple[str, str]] = [("time on this network", as_seconds(report.time_s))]
    if report.compute_s:
        rows.append(("of it computing", as_seconds(report.compute_s)))
        rows.append(("of it exposed", as_seconds(report.exposed_s)))
    rows += [
        ("rounds", f"{report.rounds}"),
        ("messages", f"{report.messages_max}"),
        ("sent", as_bytes(report.bytes_sent_max)),
        ("bits per entry", f"{report.bits_per_entry:.1f}"),
        ("entries of the result", f"{report.nnz:,} ({as_percent(report.nnz / report.elements)})"),
        ("busiest link", _busiest(report)),
        ("nothing lost", "yes" if report.conserved else f"NO: {as_percent(report.lost_share)} of gradients"),
    ]
    table(
        f"{report.method}: {report.workers} workers{teams}, {report.elements:,} elements, {report.topology}, "
        f"{as_seconds(latency)} latency, {as_rate(bandwidth)}",
        ("per step" if report.every == 1 else f"per exchange, every {report.every} steps", "most on any rank"),
        rows,
    )


def _show_sweep(options: argparse.Namespace, found: Sequence[tuple[Point, "SimulationReport"]]) -> None:
    names = list(found[0][0].varied)
    fastest = min(report.time_s for _, report in found)
    rows = [
        (
            *point.varied.values(),
            as_seconds(report.time_s),
            *((as_seconds(report.exposed_s),) if report.compute_s else ()),
            f"{report.time_s / fastest:.2f}x" if fastest else "-",
            f"{report.rounds}",
            as_bytes(report.bytes_sent_max),
            _busiest(report),
            "yes" if report.conserved else "NO",
        )
        for point, report in found
    ]
    computing: Any = ("exposed",) if found[0][1].compute_s else ()
    columns = (*names, "time", *computing, "of the fastest", "rounds", "sent", "busiest link", "nothing lost")
    table("per step, most on any rank", columns, rows)


def _busiest(report: "SimulationReport") -> str:
    link = report.busiest
    if link is None:
        return "-"
    return f"{link.name}, {as_bytes(link.bytes)}" + (f", {as_seconds(link.seconds)}" if link.seconds else "")
