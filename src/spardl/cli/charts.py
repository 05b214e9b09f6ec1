"""Pictures of benchmarks, from their records: time against whatever varies, and where the time of a step goes."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spardl.bench.match import RIVALS, sends_everything
from spardl.cli.curves import INK, MARKERS, PALETTE, STYLE
from spardl.cli.output import as_percent, as_rate, as_seconds
from spardl.collectives.methods.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

# What a step's time is spent on, from the bottom of a bar upwards.
PHASES = {
    "seconds_selecting": ("selecting", "#0072b2"),
    "seconds_packing": ("packing", "#56b4e9"),
    "seconds_waiting": ("waiting for others", "#e69f00"),
    "seconds_transferring": ("transferring", "#d55e00"),
}
WHOLE = "#b8bcc2"  # of which no parts are known

# By place in RIVALS. Theirs are dashed lines.
RIVAL_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#7f858c")
FORMAT_LINES: dict[str, Any] = {
    "fp32": ":",
    "fp16": "-.",
    "int8": (0, (4, 1, 1, 1, 1, 1)),
    "int4": (0, (4, 1)),
    "int2": (0, (2, 1)),
    "int1": (0, (1, 3)),
}

# Of bars that are this many times as long as the longest with parts, only the figure is given.
OFF_SCALE = 1.5


@dataclass(frozen=True)
class Axis:
    """What varies from record to record: where it stands, what people call it, and how they write it."""

    key: str
    name: str
    shown: Callable[[float], str]


AXES = {
    axis.key: axis
    for axis in (
        Axis("elements", "elements of the gradient", lambda count: _power(count)),
        Axis("rate", "rate of each host's line (bit/s)", lambda rate: as_rate(rate).removesuffix("bit/s")),
        Axis("workers", "workers", lambda workers: f"{workers:g}"),
        Axis("density", "density", lambda share: as_percent(share)),
        Axis("latency_s", "latency of a message", lambda seconds: _short(seconds)),
    )
}


def save_picture(records: Sequence[Record], target: str) -> None:
    """Draw what varies in these records; if nothing does, where the time goes."""
    varying = [axis for axis in AXES.values() if len({record[axis.key] for record in _with(records, axis)}) > 1]
    save(against(records, varying[0]) if varying else stacked(records), target)


def save(figure: "Figure", target: str) -> None:
    figure.savefig(target, dpi=150)


def against(records: Sequence[Record], axis: Axis, title: str = "") -> "Figure":
    """A line per method over `axis`, both logarithmic, and what no method can beat. A method without it is level."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        axes = figure.subplots()
        places = sorted({record[axis.key] for record in _with(records, axis)})
        for name in dict.fromkeys(map(label, records)):
            _line(axes, [record for record in records if label(record) == name], axis, places)
        _limits(axes, records, axis)
        _scale(axes, axis, places)
        axes.set_title(title or _title(records, axis), loc="left", fontsize="medium")
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def stacked(records: Sequence[Record], title: str = "") -> "Figure":
    """A bar per method, fastest first, of what its time is spent on; a mark where its limit lies."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    ordered = sorted(records, key=lambda record: record["median_s"])
    split = [record["median_s"] for record in ordered if _phases(record) and not sends_all(record)]
    longest = OFF_SCALE * max(split, default=ordered[-1]["median_s"])
    shown = [record for record in ordered if record["median_s"] <= longest]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.4 + 0.36 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for row, record in enumerate(shown):
            _bar(axes, row, record)
        axes.set_yticks(range(len(shown)), [label(record) for record in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, 1.14 * max(record["median_s"] for record in shown))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axes.set_title(title or _title(records, None), loc="left", fontsize="medium")
        left_out = [f"{label(record)} {as_seconds(record['median_s'])}" for record in ordered if record not in shown]
        if left_out:
            axes.set_xlabel(textwrap.fill("not shown: " + ", ".join(left_out), 80), fontsize="small")
        handles, names = axes.get_legend_handles_labels()
        each = dict(zip(names, handles, strict=True))
        order = [name for name in (*(name for name, _ in PHASES.values()), *each) if name in each]
        legend = {name: each[name] for name in order}
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def label(record: Record) -> str:
    """The method, with its value format where it is not the usual one."""
    usual = ("bf16", "fp32") if record["method"] in RIVALS or sends_all(record) else ("bf16",)
    plain = record["method"] == "fp16" or record["values"] in usual
    return str(record["method"]) if plain else f"{record['method']}, {record['values']}"


def sends_all(record: Record) -> bool:
    return record["method"] in METHODS and sends_everything(record["method"])


# --- lines ----------------------------------------------------------------------------------------------------------


def _line(axes: "Axes", found: list[Record], axis: Axis, places: list[float]) -> None:
    name = label(found[0])
    colour, marker, dashes = _look(found[0])
    style = {"color": colour, "linewidth": 2.6 if name == "spardl" else 1.4, "linestyle": dashes}
    own = sorted(_with(found, axis), key=lambda record: float(record[axis.key]))
    if own:
        xs, ys = [record[axis.key] for record in own], [record["median_s"] for record in own]
        low, high = ([record["quartiles_s"][end] for record in own] for end in (0, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(xs, ys, marker=marker, markersize=5, label=name, **style)
    elif places:
        axes.plot([places[0], places[-1]], [found[0]["median_s"]] * 2, label=name, **style)


def _limits(axes: "Axes", records: Sequence[Record], axis: Axis) -> None:
    """Draw the limit of the sparse methods, which send the least."""
    sparse = [record for record in _with(records, axis) if record["density"] < 1]
    lowest: dict[float, float] = {}
    for record in sparse:
        place = float(record[axis.key])
        lowest[place] = min(record["limit_s"], lowest.get(place, math.inf))
    if lowest:
        xs, ys = zip(*sorted(lowest.items()), strict=True)
        axes.plot(xs, ys, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="limit (sparse)")


def _with(records: Sequence[Record], axis: Axis) -> list[Record]:
    """Records to which this axis applies: what sends everything has no density."""
    return [
        record
        for record in records
        if record.get(axis.key) is not None and not (axis.key == "density" and record["density"] >= 1)
    ]


def _scale(axes: "Axes", axis: Axis, places: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    if places:
        axes.set_xticks(places, [axis.shown(place) for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    wide = math.log10(high / low) > 2.5
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(axis.name)
    axes.set_ylabel("time of one synchronisation")
    axes.grid(alpha=0.2, color=INK, linewidth=0.6)


def _look(record: Record) -> tuple[str, str, Any]:
    """Colour, marker and line: the same for a method in every picture."""
    method = record["method"]
    if method == "dense":
        return INK, "o", "-"
    if method in RIVALS:
        return RIVAL_COLOURS[RIVALS.index(method)], MARKERS[RIVALS.index(method) + 1], "--"
    ours = ["spardl", *(name for name in METHODS if name not in ("spardl", "dense"))]
    number = ours.index(method)
    dashes = "-" if label(record) == method else FORMAT_LINES[record["values"]]
    return PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)], dashes


# --- bars -----------------------------------------------------------------------------------------------------------


def _bar(axes: "Axes", row: int, record: Record) -> None:
    """Parts are means over all steps and ranks; they are drawn as shares of the median."""
    phases, median = _phases(record), record["median_s"]
    if phases:
        at, total = 0.0, sum(phases.values())
        for key, seconds in phases.items():
            name, colour = PHASES.get(key, (key.removeprefix("seconds_"), INK))
            width = median * seconds / total
            axes.barh(row, width, left=at, height=0.62, color=colour, label=name)
            at += width
    else:
        axes.barh(row, median, height=0.62, color=WHOLE, label="not split")
    axes.plot([record["limit_s"]] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2, label="limit")
    axes.annotate(as_seconds(median), (median, row), xytext=(4, 0), textcoords="offset points", va="center")


def _phases(record: Record) -> dict[str, float]:
    """In the order of the picture; what it does not know yet comes last."""
    known = [key for key in PHASES if key in record]
    others = sorted(key for key in record if key.startswith("seconds_") and key not in PHASES)
    found = {key: max(0.0, float(record[key] or 0.0)) for key in [*known, *others]}
    return found if sum(found.values()) > 0 else {}


# --- words ----------------------------------------------------------------------------------------------------------


def _title(records: Sequence[Record], axis: Axis | None) -> str:
    """What is the same in all records."""
    parts = []
    for key, text in (
        ("elements", lambda value: f"{value:,} elements"),
        ("workers", lambda value: f"{value} workers"),
        ("density", lambda value: f"density {as_percent(value)}"),
        ("rate", as_rate),
    ):
        values = {record[key] for record in records if record.get(key) is not None and (key, record[key]) != (key, 1.0)}
        if len(values) == 1 and not (axis and axis.key == key):
            parts.append(text(values.pop()))
    return ", ".join(parts)


def _power(count: float) -> str:
    exponent = round(math.log10(count))
    return f"$10^{exponent}$" if count == 10**exponent else f"{count:.2g}" if count < 1e6 else f"{count / 1e6:g} M"


def _short(seconds: float) -> str:
    if not seconds:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1g} s"
