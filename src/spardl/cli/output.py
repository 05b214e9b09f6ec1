"""What commands print: tables for people, one JSON record per line for machines."""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from spardl.cli.columns import in_columns
from spardl.errors import ConfigError
from spardl.extras import is_installed

Record = Mapping[str, Any]

# Of what is printed to a file or a pipe; a terminal has its own.
PAGE_WIDTH = 120

SHARES = ("accuracy", "HR", "NDCG")

TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


@contextlib.contextmanager
def records(target: str | None) -> Iterator[Callable[[Record], None]]:
    """Give a function that writes records to `target`: a file, `-` for standard output, or None for nowhere.

    With `-`, whatever else would reach standard output meanwhile, from native code too, goes to standard error.
    A file is looked at before the work begins and holds, at any time, the records so far.
    """
    if target is None:
        yield lambda record: None
    elif target == "-":
        with _standard_output() as stream:
            yield lambda record: print(to_json(record), file=stream, flush=True)
    else:
        check_target(target)
        lines: list[str] = []

        def write(record: Record) -> None:
            lines.append(f"{to_json(record)}\n")
            Path(target).write_text("".join(lines), encoding="utf-8")

        yield write


def to_json(record: Record) -> str:
    """One line. What JSON cannot say, infinite and undefined numbers, becomes null."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextlib.contextmanager
def _standard_output() -> Iterator[TextIO]:
    """The real standard output; descriptor 1 points at standard error meanwhile."""
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(real), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        os.dup2(real, 1)
        os.close(real)


def check_target(target: str | None) -> None:
    """Refuse a `--json` file that cannot be written."""
    if target in (None, "-"):
        return
    path = Path(str(target))
    if path.is_dir():
        raise ConfigError(f"cannot write {target}: it is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {target}: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {target}: permission denied.")


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = "", figures: bool = True
) -> None:
    """Print a table on standard output: the first column names things, the others hold figures, or else text."""
    right = [figures and position > 0 for position in range(len(columns))]
    (_styled_table if has_rich() else _plain_table)(title, columns, rows, right, note)


def has_rich() -> bool:
    """Whether tables have rules and progress has bars. Without rich, all of it is plain text."""
    return is_installed("rich")


def _plain_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], note: str
) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PAGE_WIDTH
    print(title, "", *in_columns(columns, rows, width=width, right=right), "", sep="\n")
    if note:
        print(note)


def _styled_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], note: str
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, to_right in zip(columns, right, strict=True):
        grid.add_column(column, justify="right" if to_right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PAGE_WIDTH)
    console.print(title, style="bold", highlight=False)
    console.print(grid)
    if note:
        console.print(note, style="dim", highlight=False)


def as_bytes(count: float) -> str:
    """`12.3 kB`: decimal units, as networks have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"


def as_seconds(*durations: float) -> str:
    """`4.20 ms`, or `4.20-5.13 ms`: three digits, and the unit that suits the largest."""
    largest = max(durations)
    unit, size = next(((unit, size) for unit, size in TIMES if largest >= size), TIMES[-1])
    return "-".join(_three_digits(duration / size) for duration in durations) + f" {unit}"


def as_rate(bytes_per_second: float) -> str:
    """A rate as networks have it: `1 Gbit/s`."""
    if not math.isfinite(bytes_per_second):
        return "unlimited"
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)):
        if bits >= size:
            return f"{bits / size:g} {unit}"
    return f"{bits:g} bit/s"


def as_ratio(speedup: float) -> str:
    """`12.3x faster`, or `1.4x slower` where the ratio is below one."""
    if not (math.isfinite(speedup) and speedup > 0):
        return "-"
    return f"{_three_digits(speedup)}x faster" if speedup >= 1 else f"{_three_digits(1 / speedup)}x slower"


def as_figure(name: str, value: float) -> str:
    """Shares, such as accuracy and HR@10, in percent; anything else, such as a loss, as a number."""
    if name.partition("@")[0] in SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"


def as_percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
