"""`spardl bench`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from spardl.bench.match import RIVALS, Match, sends_everything
from spardl.bench.vectors import Vector, check_elements, vector_of_length
from spardl.cli.options import (
    DEFAULTS,
    add_json_option,
    add_seed_option,
    add_sync_options,
    add_worker_options,
    sync_configs,
)
from spardl.cli.output import as_bytes, as_percent, as_rate, as_ratio, as_seconds, records, table
from spardl.cli.parser import Numbers, number_of
from spardl.cli.plot import check_plot
from spardl.cli.ranks import run_on_ranks
from spardl.cli.units import bytes_per_second, seconds
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.launch.place import Place
from spardl.train.models.sizes import FACTS, check_sized, parameter_shapes

if TYPE_CHECKING:
    from spardl.bench.run import BenchReport

SUMMARY = "time the synchronisation of gradients under several methods, side by side in one run"

ELEMENTS = 1_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add("--elements", type=_sizes, metavar="N,N,...", help=f"lengths of the gradient (default: {ELEMENTS})")
    add("--model", metavar="NAMES", help=f"gradients of these models instead: {', '.join(FACTS)}")
    densities = "run each sparse method at each of these densities, instead of --density"
    add("--densities", type=Numbers("0.01,0.001"), metavar="D,D,...", help=densities)
    add(
        "--rivals",
        default="none",
        metavar="NAMES",
        help=f"what others offer, in the same run: {', '.join(RIVALS)}; all or none (default: %(default)s)",
    )
    add(
        "--repetitions",
        type=number_of("repetitions"),
        default=20,
        metavar="N",
        help="of each method, taking turns (default: %(default)s)",
    )
    add(
        "--warmup",
        type=number_of("repetitions", at_least=0),
        default=3,
        metavar="N",
        help="repetitions before the clock counts (default: %(default)s)",
    )
    add("--rate", default="inf", metavar="RATE", help="of each host's line, to compute the limit with: 200mbit, 1gbit")
    add("--latency", default="0", metavar="TIME", help="let every message take so much longer: 500us, 5ms")
    add_seed_option(group, "of the gradients", default=0)
    add_json_option(group, "one record per gradient and method")
    add("--picture", metavar="FILE", help="draw time against what varies, or else what it is spent on")
    add_worker_options(parser)
    add_sync_options(parser, several_methods=True)


def run(options: argparse.Namespace) -> int:
    match = chosen_match(options)
    vectors = chosen_vectors(options)
    check_plot(options.picture)

    def measure(place: Place) -> None:
        from spardl.bench.run import Bench

        first = place.rank == 0
        found: list[BenchReport] = []
        with records(options.json if first else None) as write:
            bench = Bench(match)
            for make in vectors:
                vector = make()
                reports = bench.measure(vector, _progress(vector) if first else None)
                for report in reports:
                    write(report.to_dict())
                if first and options.json != "-":
                    show(reports)
                found += reports
        if first and options.picture:
            from spardl.cli.charts import save_picture

            save_picture([report.to_dict() for report in found], options.picture)

    return run_on_ranks(options, match.configs, measure)


# --- what is run ----------------------------------------------------------------------------------------------------


def chosen_match(options: argparse.Namespace) -> Match:
    densities = chosen_densities(options)
    return Match(
        configs=chosen_configs(options, densities),
        rivals=chosen_rivals(options.rivals),
        densities=densities,
        repetitions=options.repetitions,
        warmup=options.warmup,
        seed=options.seed,
        latency=seconds(options.latency),
        rate=bytes_per_second(options.rate),
    )


def chosen_densities(options: argparse.Namespace) -> list[float]:
    if options.densities is None:
        return [options.density]
    if not options.densities:
        raise ConfigError("--densities names no density; write it as 0.01,0.001.")
    if options.density != DEFAULTS["density"]:
        raise ConfigError("give --density or --densities, not both.")
    return list(dict.fromkeys(options.densities))


def chosen_configs(options: argparse.Namespace, densities: Sequence[float]) -> list[SyncConfig]:
    """Each method at each density and in each value format, in the order in which methods were named."""
    formats = [name.strip() for name in options.values.split(",") if name.strip()]
    if not formats:
        raise ConfigError("--values names no format; write it as bf16 or bf16,int8.")
    found: list[SyncConfig] = []
    for density in densities:
        for values in formats:
            given = argparse.Namespace(**{**vars(options), "density": density, "values": values})
            known = {config.method for config in found if sends_everything(config.method)}
            found += [config for config in sync_configs(given) if config.method not in known]
    methods = [config.method for config in found]
    return sorted(found, key=lambda config: methods.index(config.method))


def chosen_rivals(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(RIVALS)
    return [] if names == ["none"] else list(dict.fromkeys(names))


def chosen_vectors(options: argparse.Namespace) -> list[Callable[[], Vector]]:
    """What makes each gradient. The names are checked here; torch is needed for the rest."""
    if options.model is not None and options.elements is not None:
        raise ConfigError("give --elements or --model, not both.")
    if options.model is not None:
        names = [name.strip() for name in options.model.split(",") if name.strip()]
        for name in names:
            check_sized(name)
        return [partial(vector_of_model, name) for name in names]
    sizes = (ELEMENTS,) if options.elements is None else options.elements
    for size in sizes:
        check_elements(size)
    return [partial(vector_of_length, size) for size in sizes]


def vector_of_model(name: str) -> Vector:
    """The gradient of this model, with its real tensors. Takes no memory for them."""
    return Vector(name, parameter_shapes(name))


def _sizes(text: str) -> tuple[int, ...]:
    whole = number_of("elements")
    sizes = tuple(dict.fromkeys(whole(part) for part in text.split(",") if part.strip()))
    if not sizes:
        raise argparse.ArgumentTypeError("it names no size, write it as 1e6 or 1e4,1e6")
    return sizes


# --- what is shown --------------------------------------------------------------------------------------------------


def _progress(vector: Vector) -> Callable[[int, int], None] | None:
    """A line that is written over, on a terminal."""
    if not sys.stderr.isatty():
        return None

    def say(turn: int, turns: int) -> None:
        end = "\r" if turn < turns else "\r\033[K"
        print(f"{vector.elements:,} elements: turn {turn} of {turns}", end=end, file=sys.stderr, flush=True)

    return say


def show(reports: "Sequence[BenchReport]") -> None:
    first = reports[0]
    columns = _columns(reports)
    table(
        _title(reports),
        list(columns),
        [[shown(report) for shown in columns.values()] for report in reports],
        note=f"{first.repetitions} repetitions each, taking turns; time of the slowest worker, bytes that one sends.\n"
        "limit: the bytes that must travel at this density"
        + (" over the line, " if first.rate else " (no rate was given, so they cost nothing), ")
        + "and one pass over memory to add, one to select.",
    )


def _columns(reports: "Sequence[BenchReport]") -> "dict[str, Callable[[BenchReport], str]]":
    """Name and content. What says which record this is takes the place of a figure that the others imply."""
    extra = _distinguishing(reports)
    bits: dict[str, Callable[[BenchReport], str]] = {"bits per entry": lambda report: f"{report.bits_per_entry:.1f}"}
    return {
        "method": lambda report: report.method,
        **extra,
        "median": lambda report: as_seconds(report.median_s),
        "middle half": lambda report: as_seconds(*report.quartiles_s),
        "limit": lambda report: as_seconds(report.limit.total),
        "x of limit": lambda report: f"{report.times_limit:.1f}",
        "rounds": lambda report: str(report.rounds),
        "sent": lambda report: as_bytes(report.bytes_sent),
        **({} if extra else bits),
        "against dense": _against_dense,
    }


def _distinguishing(reports: "Sequence[BenchReport]") -> "dict[str, Callable[[BenchReport], str]]":
    """Columns that say which record this is, where the method alone does not."""
    columns: dict[str, Callable[[BenchReport], str]] = {}
    sparse = [report for report in reports if report.density < 1]
    if len({report.density for report in sparse}) > 1:
        columns["density"] = lambda report: as_percent(report.density) if report.density < 1 else ""
    ours = [report for report in sparse if report.method not in RIVALS]
    if len({report.values for report in ours}) > 1:
        columns["values"] = lambda report: report.values
    return columns


def _title(reports: "Sequence[BenchReport]") -> str:
    first = reports[0]
    parts = [f"{first.model}: " * bool(first.model) + f"one gradient of {first.elements:,} elements"]
    densities = {report.density for report in reports if report.density < 1}
    if len(densities) == 1:
        parts[0] += f" at a density of {as_percent(densities.pop())}"
    parts.append(f"{first.workers} workers")
    if first.rate:
        parts.append(f"lines of {as_rate(first.rate)}")
    if first.latency_s:
        parts.append(f"{as_seconds(first.latency_s)} more for every message")
    text = ", ".join(parts)
    return text[0].upper() + text[1:] if not first.model else text


def _against_dense(report: "BenchReport") -> str:
    if report.method == "dense" or report.speedup_vs_dense is None:
        return ""
    return as_ratio(report.speedup_vs_dense)
