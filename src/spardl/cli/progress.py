"""What a person sees while a recipe trains: a bar on a terminal, one line per epoch elsewhere. On standard error."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from spardl.train.loop import EpochReport, Observer


@contextlib.contextmanager
def observer(rank: int) -> Iterator["Observer"]:
    """Rank 0 reports; the others are quiet."""
    if rank != 0:
        yield Quiet()
    elif sys.stderr.isatty():
        with _progress() as progress:
            yield Bar(progress)
    else:
        yield Lines()


def describe(report: "EpochReport") -> str:
    return f"loss {report.train_loss:.3f}, test accuracy {100 * report.accuracy:.1f} %"


class Quiet:
    def begin(self, method: str, epochs: int, steps: int) -> None:
        pass

    def step(self) -> None:
        pass

    def epoch(self, report: "EpochReport") -> None:
        pass


class Lines(Quiet):
    """One line per epoch."""

    def begin(self, method: str, epochs: int, steps: int) -> None:
        self._method, self._epochs = method, epochs

    def epoch(self, report: "EpochReport") -> None:
        line = f"{self._method} epoch {report.epoch}/{self._epochs}: {describe(report)}, {report.seconds:.1f} s"
        print(line, file=sys.stderr, flush=True)


class Bar:
    """One bar per run, with what the last epoch brought."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, method: str, epochs: int, steps: int) -> None:
        self._task = self._progress.add_task(method, total=epochs * steps, news="")

    def step(self) -> None:
        self._update(advance=1)

    def epoch(self, report: "EpochReport") -> None:
        self._update(news=f"epoch {report.epoch}: {describe(report)}")

    def _update(self, **changes: Any) -> None:
        assert self._task is not None, "a run begins before it steps"
        self._progress.update(self._task, **changes)


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
