"""`spardl data list` and `spardl data fetch`."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spardl.cli.options import add_json_option
from spardl.cli.output import as_bytes, as_seconds, has_rich, records, table
from spardl.cli.parser import Parser

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from spardl.train.data.catalogue import Listing
    from spardl.train.data.fetch import Watcher

SUMMARY = "list the data sets, and fetch their official files"

LINES_PER_FILE = 10  # where there is no terminal


class Action(Parser):
    """Complains about unknown options itself: its own are the nearest."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return options, unknown


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", parser_class=Action)
    what = "list the data sets with the files that they need; so does `spardl data` alone"
    add_json_option(actions.add_parser("list", help=what, description=what), "one record per data set")
    what = "download the official files of a data set, check and unpack them; run it again to resume"
    fetch = actions.add_parser("fetch", help=what, description=what)
    fetch.add_argument("name", metavar="NAME", help="a name that `spardl data list` shows")
    fetch.add_argument("--data-dir", type=Path, metavar="DIR", required=True, help="where the files shall lie")
    fetch.add_argument(
        "--url",
        metavar="URL",
        help="another address of the file; if it ends in /, of the folder with all files under their official names",
    )


def run(options: argparse.Namespace) -> int:
    if options.action == "fetch":
        return _fetch(options)
    return _list(getattr(options, "json", None))


def _list(target: str | None) -> int:
    from spardl.train.data.catalogue import CATALOGUE

    with records(target) as write:
        for name, about in CATALOGUE.items():
            write(_record(name, about))
    if target != "-":
        table(
            "Data sets",
            ("data set", "what it is", "files that it needs", "to get them"),
            [(name, about.summary, about.needs or "none", _source(about)) for name, about in CATALOGUE.items()],
            note="fetch: `spardl data fetch NAME --data-dir DIR` downloads them; --data-dir also tells training where"
            " they are",
            figures=False,
        )
    return 0


def _record(name: str, about: "Listing") -> dict[str, Any]:
    return {
        "data": name,
        "summary": about.summary,
        "needs": about.needs,
        "urls": [download.url for download in about.downloads],
        "bytes": _bytes(about),
        "advice": about.advice,
    }


def _bytes(about: "Listing") -> int | None:
    """What is to be downloaded in all, if that is known."""
    sizes = [download.size for download in about.downloads]
    return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None


def _source(about: "Listing") -> str:
    if not about.downloads:
        return about.advice
    size = _bytes(about)
    return "fetch" if size is None else f"fetch, {as_bytes(size)}"


def _fetch(options: argparse.Namespace) -> int:
    from spardl.train.data.fetch import fetch

    with _watcher() as watcher:
        paths = fetch(options.name, options.data_dir, watcher, url=options.url)
    print(f"{options.name} is in {_common(paths)}.", file=sys.stderr)
    return 0


def _common(paths: Sequence[Path]) -> Path:
    return paths[0] if len(paths) == 1 else paths[0].parent


@contextlib.contextmanager
def _watcher() -> Iterator["Watcher"]:
    if sys.stderr.isatty() and has_rich():
        with _progress() as progress:
            yield Bar(progress)
    else:
        yield Lines()


class Lines:
    """A line when a file begins, at each tenth of it, and when there is something to know."""

    def begin(self, file: str, done: int, total: int | None) -> None:
        self._file, self._done, self._total = file, done, total
        self._shown = self._part()
        self._started = time.perf_counter()
        size = "" if total is None else f", {as_bytes(total)}"
        self.tell(f"fetching {file}{size}" + (f", from {as_bytes(done)} on" if done else ""))

    def advance(self, count: int) -> None:
        self._done += count
        if self._part() > self._shown:
            self._shown = self._part()
            seconds = as_seconds(time.perf_counter() - self._started)
            self.tell(f"{self._file}: {as_bytes(self._done)}, {100 * self._shown // LINES_PER_FILE} % after {seconds}")

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _part(self) -> int:
        return LINES_PER_FILE * self._done // self._total if self._total else 0


class Bar:
    """One bar per file."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._current: TaskID | None = None

    def begin(self, file: str, done: int, total: int | None) -> None:
        if file not in self._tasks:
            self._tasks[file] = self._progress.add_task(file, total=total)
        self._current = self._tasks[file]
        self._progress.update(self._current, completed=done, total=total)

    def advance(self, count: int) -> None:
        assert self._current is not None, "a download begins before it advances"
        self._progress.update(self._current, advance=count)

    def tell(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
