"""Pictures of simulations: a timeline of one run, or the time over what was swept."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spardl.cli.curves import INK, MARKERS, PALETTE, STYLE
from spardl.cli.output import as_seconds
from spardl.cli.units import bytes_per_second, seconds
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from spardl.cli.scenario import Point
    from spardl.simulator.driver import Span
    from spardl.simulator.simulation import SimulationReport

    Found = Sequence[tuple[Point, SimulationReport]]

COMPUTING = {"forward": "#9db7d5", "backward": "#7d97b5", "optimizer": "#b8bcc2", "selecting": "#e0a030"}
MOST_BARS = 40


def draw(found: "Found", target: str) -> None:
    """A timeline, if nothing was swept; else the time of a step over it. PNG, SVG or PDF by the name's end."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = over_sweep(found) if found[0][0].varied else timeline(found[0][1])
    figure.savefig(target, dpi=150)


def timeline(report: "SimulationReport") -> "Figure":
    """Two lanes per rank: what it computes, and what travels."""
    from matplotlib.figure import Figure

    ranks = sorted({span.rank for span in report.spans})
    figure = Figure(figsize=(10, 1.6 + 0.45 * max(1, len(ranks))), layout="constrained")
    axes = figure.subplots()
    colours = _colours(report.spans)
    for span in report.spans:
        row = ranks.index(span.rank) + (-0.2 if span.computing else 0.2)
        axes.barh(
            row,
            (span.end - span.start) * 1e3,
            left=span.start * 1e3,
            height=0.36,
            color=colours[span.name],
            edgecolor="white",
            linewidth=0.3,
            label=span.name,
        )
    axes.set_yticks(range(len(ranks)), [f"worker {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.set_title(
        f"{report.method}, {report.workers} workers, {report.topology}: {as_seconds(report.time_s)} a step",
        loc="left",
        fontsize="medium",
    )
    handles, names = axes.get_legend_handles_labels()
    legend: dict[str, Any] = dict(zip(names, handles, strict=True))
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _colours(spans: "Sequence[Span]") -> Mapping[str, str]:
    rounds = dict.fromkeys(span.name for span in spans if span.name not in COMPUTING)
    return {**COMPUTING, **{name: PALETTE[place % len(PALETTE)] for place, name in enumerate(rounds)}}


def over_sweep(found: "Found") -> "Figure":
    """A line per combination of everything else over the first sweep whose values are numbers; bars if none are."""
    from matplotlib.figure import Figure

    names = list(found[0][0].varied)
    along = next((name for name in names if all(_number(point.varied[name]) is not None for point, _ in found)), None)
    if along is None:
        return _bars(found)
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    others: dict[str, list[tuple[float, float]]] = {}
    for point, report in found:
        label = ", ".join(_said(name, value) for name, value in point.varied.items() if name != along)
        others.setdefault(label, []).append((_number(point.varied[along]) or 0.0, report.time_s))
    for place, (label, line) in enumerate(others.items()):
        xs, ys = zip(*sorted(line), strict=True)
        style: dict[str, Any] = {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}
        axes.plot(xs, ys, label=label, markersize=5, **style)
    texts = {(_number(point.varied[along]) or 0.0): point.varied[along] for point, _ in found}
    _scale(axes, along, texts, positive=all(report.time_s > 0 for _, report in found))
    if list(others) != [""]:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def _said(name: str, value: str) -> str:
    """A method or a topology speaks for itself; a number needs its name."""
    return value if _number(value) is None else f"{name} {value}"


def _scale(axes: "Axes", along: str, texts: Mapping[float, str], *, positive: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if all(place > 0 for place in texts):
        axes.set_xscale("log")
        axes.set_xticks(list(texts), list(texts.values()))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if positive:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: as_seconds(value) if value > 0 else "0"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(along)
    axes.set_ylabel("time of a step")
    axes.grid(alpha=0.2, color=INK, linewidth=0.6)


def _bars(found: "Found") -> "Figure":
    from matplotlib.figure import Figure

    shown = sorted(found, key=lambda each: each[1].time_s)[:MOST_BARS]
    figure = Figure(figsize=(7.2, 1.2 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for row, (_, report) in enumerate(shown):
        axes.barh(row, report.time_s, height=0.62, color=PALETTE[0])
        axes.annotate(as_seconds(report.time_s), (report.time_s, row), xytext=(4, 0), textcoords="offset points")
    axes.set_yticks(range(len(shown)), [", ".join(point.varied.values()) for point, _ in shown])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step (s)")
    return figure


def _number(text: str) -> float | None:
    """A value as a number, with its unit if it has one."""
    for parse in (float, seconds, bytes_per_second):
        try:
            return parse(text)
        except (ValueError, ConfigError):
            continue
    return None
