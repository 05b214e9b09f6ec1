"""`spardl compare --page`: table, pictures and settings in one HTML file, which needs nothing else and runs nothing."""

import dataclasses
import os
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spardl.cli.curves import INK, OVER_BYTES, OVER_STEPS, OVER_TIME, Curve, as_svg, is_dense, points
from spardl.cli.output import as_bytes, as_figure, as_percent, as_seconds, check_target
from spardl.cli.plot import check_drawing
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigError
from spardl.train.report import TrainReport, rule_name
from spardl.update import LocalUpdates
from spardl.version import __version__

if TYPE_CHECKING:
    from spardl.cli.summary import Summary

ENDINGS = (".html", ".htm")

# On a narrow screen, each row of a table with this class becomes a list of names and figures.
STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1e22; --soft: #5b636d; --paper: #ffffff; --raised: #f5f6f7; --line: #d9dde1; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #a0a7af; --paper: #15171a; --raised: #1f2226; --line: #3a3f45; }
  svg { filter: brightness(1.35); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0; }
.soft, figcaption, footer { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tbody th, td { white-space: nowrap; }
.plain th:first-child { position: sticky; left: 0; background: var(--paper); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: 0 2rem; margin: 0;
  font-size: .9rem; }
dl div { display: flex; justify-content: space-between; gap: 1rem; padding: .2rem 0;
  border-bottom: 1px solid var(--line); }
dt { color: var(--soft); }
dd { margin: 0; text-align: right; }
pre { margin: 0; padding: .75rem; background: var(--raised); border-radius: .4rem; white-space: pre-wrap;
  font-size: .85rem; }
details { margin-top: 1rem; }
summary { cursor: pointer; }
details[open] > summary { margin-bottom: .5rem; }
footer { margin-top: 2.5rem; }
@media (max-width: 44rem) {
  .cards thead { position: absolute; clip-path: inset(50%); }
  .cards tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .cards th, .cards td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0; }
  .cards td::before { content: attr(data-name); color: var(--soft); }
  .cards td:empty { display: none; }
}
"""
# The browser itself is told to fetch and run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def check_page(target: str | None) -> None:
    """Refuse before the work what could not be written after it."""
    if target is None:
        return
    if Path(target).suffix.lower() not in ENDINGS:
        raise ConfigError(f"cannot write a page to {target}: give it a name that ends in {' or '.join(ENDINGS)}.")
    check_target(target)
    check_drawing()


def write_page(target: str, tables: "Sequence[Summary]", curves: Sequence[Curve], arguments: Sequence[str]) -> None:
    # A file name that is no text in any encoding may stand in the command line.
    page = render(tables, curves, arguments)
    Path(target).write_text(page, encoding="utf-8", errors="backslashreplace")


def render(tables: "Sequence[Summary]", curves: Sequence[Curve], arguments: Sequence[str]) -> str:
    """The first table is the page's own, and others follow it."""
    first, (summary, *others) = curves[0].runs[0], tables
    title = f"{first.recipe}: {', '.join(curve.label for curve in curves)}"
    picture_titles = {
        OVER_STEPS: f"Test {first.metric} over steps",
        OVER_TIME: f"Test {first.metric} over training time",
        OVER_BYTES: f"Test {first.metric} over bytes sent by one worker",
    }
    seeds = len(curves[0].runs)
    caption = "Each test is a point." if seeds == 1 else f"Thick: mean of {seeds} seeds. Thin: each seed."
    pictures = (
        f"<figure>{_inline(as_svg(curves, name), name, text)}"
        f"<figcaption>{escape(text)}. {caption}</figcaption></figure>"
        for name, text in picture_titles.items()
    )
    body = [
        f"<h1>{escape(summary.title)}</h1>",
        f'<p class="soft">{escape(first.model)} on {escape(first.data)}, the same recipe under each method</p>',
        _table(summary.columns, summary.rows, style="cards"),
        f'<p class="soft">{escape(_sentences(summary.notes))}</p>',
        *(part for other in others for part in _section(other)),
        "<h2>Pictures</h2>",
        f'<div class="pictures">{"".join(pictures)}</div>',
        f"<details><summary>The figures behind the pictures</summary>{_table(*_tests(curves))}</details>",
        "<h2>Each run</h2>",
        _table(*_runs(curves)),
        "<h2>Settings of all runs</h2>",
        _list(_shared_settings(curves)),
        "<h2>Made with</h2>",
        f"<pre>{escape(shlex.join(['spardl', *arguments]))}</pre>",
        f"<footer>{escape(_origin())}</footer>",
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines) + "\n"


def _section(table: "Summary") -> Iterator[str]:
    yield f"<h2>{escape(table.title)}</h2>"
    yield _table(table.columns, table.rows, style="cards")
    yield f'<p class="soft">{escape(_sentences(table.notes))}</p>'


# --- parts of it ----------------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, style: str = "plain") -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{_row(columns, row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(columns: Sequence[str], row: Sequence[str]) -> str:
    cells = (
        f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(columns[1:], row[1:], strict=True)
    )
    return f'<th scope="row">{escape(row[0])}</th>{"".join(cells)}'


def _list(pairs: dict[str, str]) -> str:
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f"<dl>{''.join(items)}</dl>"


def _inline(svg: str, name: str, title: str) -> str:
    """A picture as part of a page: as wide as there is room, in the page's colour of text, with names of its own."""
    head, _, rest = svg[svg.index("<svg") :].partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, head
    rest = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", rest).replace(INK, "currentColor")
    return f'<svg {box[0]} role="img" aria-label="{escape(title)}">{rest}'


def _sentences(notes: Sequence[str]) -> str:
    return " ".join(f"{note[0].upper()}{note[1:].rstrip('.')}." for note in notes)


def _runs(curves: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """What differs from run to run beside the result: the density asked for, and where the time went."""
    columns = ["method", "seed", "learning rate", "update rule", "density asked for"]
    columns += ["rounds per step", "bits per entry", "samples per second"]
    columns += ["computing", "selecting", "waiting", "transferring", "weights at the end"]
    rows = [
        [
            curve.label,
            str(run.settings.seed),
            f"{run.settings.lr:g}",
            _rule(run.rule),
            _density(run.config),
            f"{run.costs.rounds / run.steps:.3g}",
            f"{run.costs.bits_per_entry:.1f}",
            f"{run.samples_per_second:,.0f}",
            *(f"{100 * part / (run.seconds or 1.0):.0f} %" for part in _split(run)),
            run.parameters_sha256[:8],
        ]
        for curve in curves
        for run in curve.runs
    ]
    return columns, rows


def _split(run: TrainReport) -> tuple[float, ...]:
    costs = run.costs
    return run.seconds_computing, costs.seconds_selecting, costs.seconds_waiting, costs.seconds_transferring


def _rule(rule: LocalUpdates | None) -> str:
    """Its name, and what is set otherwise than by default."""
    if rule is None:
        return rule_name(rule)
    fields = [field for field in dataclasses.fields(rule) if getattr(rule, field.name) != field.default]
    told = [f"{field.name.replace('_', ' ')} {_shown(getattr(rule, field.name))}" for field in fields]
    return ", ".join([rule_name(rule), *told])


def _density(config: SyncConfig) -> str:
    asked = config.density
    if is_dense(config.method):
        return "all"
    if not isinstance(asked, DensitySchedule):
        return as_percent(asked)
    return f"{as_percent(asked.start)} to {as_percent(asked.target)} in {asked.steps:,} steps"


def _shared_settings(curves: Sequence[Curve]) -> dict[str, str]:
    first = curves[0].runs[0]
    settings: dict[str, Any] = {
        "recipe": first.recipe,
        "model": first.model,
        "dataset": first.data,
        "workers": first.workers,
        **dataclasses.asdict(first.settings),
        **dataclasses.asdict(first.config),
    }
    # These are told by method and by run.
    for name in ("method", "density", "seed", "lr"):
        del settings[name]
    return {name.replace("_", "-"): _shown(value) for name, value in settings.items() if value not in (None, ())}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(_shown(one) for one in value) if isinstance(value, tuple | list) else str(value)


def _tests(curves: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    metric = curves[0].runs[0].metric
    rows = [
        [
            curve.label,
            str(run.settings.seed),
            f"{point.step:,}",
            as_seconds(point.seconds),
            as_bytes(point.bytes_sent),
            as_figure(metric, point.score),
        ]
        for curve in curves
        for run in curve.runs
        for point in points(run)
    ]
    return ["method", "seed", "step", "time", "sent", f"test {metric}"], rows


def _origin() -> str:
    from importlib.metadata import version

    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return (
        f"spardl {__version__}, PyTorch {version('torch')}, Python {platform.python_version()};"
        f" {platform.system()} on {platform.machine()} with {os.cpu_count()} processors; {when}"
    )
