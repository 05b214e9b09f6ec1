"""What a person sees while a recipe trains: a bar per epoch on a terminal, and a line per epoch. On standard error.

The bar is drawn by rich; without it there are the lines.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from spardl.cli.output import as_figure, has_rich
from spardl.train.report import EpochReport, Outline, Quiet, Reading, StepReport

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from spardl.train.report import Observer


@contextlib.contextmanager
def observer(rank: int) -> Iterator["Observer"]:
    """Rank 0 reports; the others are quiet."""
    if rank != 0:
        yield Quiet()
    elif sys.stderr.isatty() and has_rich():
        with _progress() as progress:
            yield Bar(progress)
    else:
        yield Lines()


class Lines(Quiet):
    """One line per epoch, and one per test in the middle of one."""

    def begin(self, outline: Outline) -> None:
        self._outline = outline
        if outline.first_step:
            self._say(f"{outline.way}: goes on from step {outline.first_step:,} of {outline.last_step:,}")

    def tested(self, reading: Reading) -> None:
        title = f"{self._outline.way} step {reading.step:,}/{self._outline.last_step:,}"
        self._say(f"{title}: {self._found(reading.figures)}, {reading.seconds:.1f} s")

    def epoch(self, report: EpochReport) -> None:
        parts = [f"loss {report.train_loss:.3f}"]
        if report.figures:
            parts.append(self._found(report.figures))
        parts += [f"{report.seconds:.1f} s", f"{report.samples_per_second:,.0f} samples/s"]
        self._say(f"{self._title(report.epoch)}: {', '.join(parts)}")

    def _found(self, figures: Mapping[str, float]) -> str:
        metric = self._outline.metric
        return f"test {metric} {as_figure(metric, figures[metric])}"

    def _title(self, epoch: int) -> str:
        return f"{self._outline.way} epoch {epoch}/{self._outline.epochs}"

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Bar(Lines):
    """One bar for the epoch that is going on, below the lines of those before it."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def step(self, report: StepReport) -> None:
        outline = self._outline
        before = (report.epoch - 1) * outline.steps_per_epoch
        if self._task is None:
            total = min(outline.steps_per_epoch, outline.last_step - before)
            self._task = self._progress.add_task(self._title(report.epoch), total=total, news="")
        self._progress.update(self._task, completed=report.step - before, news=f"loss {report.loss:.3f}")

    def epoch(self, report: EpochReport) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        super().epoch(report)

    def _say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False)


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}"),
        console=Console(stderr=True),
    )
