"""`--dashboard` and `--dashboard-file`: a run as a live page, and the same page as a file."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spardl.cli.output import check_target
from spardl.dashboard.server import Dashboard
from spardl.errors import ConfigError
from spardl.train.report import EpochReport, Outline, Quiet, Reading, StepReport

if TYPE_CHECKING:
    from spardl.integrations.handle import SyncHandle

ENDINGS = (".html", ".htm")


def add_dashboard_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dashboard",
        nargs="?",
        const=0,
        type=_port,
        metavar="PORT",
        help="show the run on a live page at 127.0.0.1, at this port or one that is free",
    )
    group.add_argument("--dashboard-file", metavar="FILE", help="leave that page behind as one .html file")


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, give 1 to 65535, or nothing for a free one")
    return int(text)


def check_dashboard(options: argparse.Namespace) -> None:
    """Refuse before the work what could not be written after it."""
    target = options.dashboard_file
    if target is not None and not target.lower().endswith(ENDINGS):
        raise ConfigError(f"cannot write a page to {target}: give it a name that ends in {' or '.join(ENDINGS)}.")
    check_target(target)


@contextlib.contextmanager
def board_for(options: argparse.Namespace, rank: int) -> Iterator["Board | None"]:
    """On rank 0, if it was asked for. The file is written however the run ends."""
    if rank != 0 or (options.dashboard is None and options.dashboard_file is None):
        yield None
        return
    board = Board()
    if options.dashboard is not None:
        print(f"spardl: the dashboard is at {board.page.serve(options.dashboard)}", file=sys.stderr, flush=True)
    try:
        yield board
    finally:
        board.page.close()
        if options.dashboard_file is not None:
            board.page.export(options.dashboard_file)
            print(f"spardl: the dashboard is kept in {options.dashboard_file}", file=sys.stderr, flush=True)


class Board(Quiet):
    """Tells a dashboard what a run's observers are told."""

    def __init__(self) -> None:
        self.page = Dashboard("spardl train")
        self._samples_per_step = 0

    def connect(self, sync: "SyncHandle") -> None:
        """Show the steps of this synchronisation too."""
        from spardl.integrations.observers import connect

        connect(self.page, sync)

    def begin(self, outline: Outline) -> None:
        facts = {"recipe": outline.recipe, "method": outline.way, "epochs": str(outline.epochs)}
        self.page.history.describe(f"{outline.recipe}, {outline.way}", outline.workers, facts)
        self._samples_per_step = outline.samples_per_step

    def step(self, report: StepReport) -> None:
        rate = self._samples_per_step / report.seconds if report.seconds else 0.0
        values = {"loss of this rank": report.loss, "learning rate": report.lr, "samples per second": rate}
        self.page.history.log(report.step, {**values, "step seconds": report.seconds})

    def tested(self, reading: Reading) -> None:
        self._figures(reading.step, reading.figures)

    def epoch(self, report: EpochReport) -> None:
        self.page.history.log(report.step, {"training loss": report.train_loss})
        self._figures(report.step, report.figures)

    def _figures(self, step: int, figures: dict[str, float]) -> None:
        self.page.history.log(step, {f"test {name}": value for name, value in figures.items()})
