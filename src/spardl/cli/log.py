"""`--log-dir`: a run in JSON lines, and in TensorBoard's event files where TensorBoard is installed."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from spardl.cli.output import to_json
from spardl.errors import ConfigError
from spardl.extras import how_to_install, is_installed
from spardl.train.report import EpochReport, Outline, Quiet, Reading, StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "log.jsonl"


def check_log_dir(folder: Path | None, *, resuming: bool) -> None:
    """Refuse a folder that cannot be written to, or that holds another run's log."""
    if folder is None:
        return
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise ConfigError(f"cannot write a log to {folder}: {nearest} is a file.")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"cannot write a log to {folder}: permission denied.")
    if (folder / FILE).exists() and not resuming:
        raise ConfigError(f"{folder} holds the log of an earlier run; choose another folder, or go on with --resume.")


class Log(Quiet):
    """Writes as it goes. A run that is taken up again goes on in the same file, from the step where it stands."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not is_installed("tensorboard"):
            print(
                "spardl: TensorBoard is not installed, so the log is JSON lines only;"
                f" {how_to_install('tensorboard')} adds it.",
                file=sys.stderr,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def begin(self, outline: Outline) -> None:
        self._samples_per_step = outline.samples_per_step
        self._forget_after(outline.first_step)
        if is_installed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=outline.first_step + 1)
        self._write("begin", dataclasses.asdict(outline))

    def step(self, report: StepReport) -> None:
        if report.step % self._every:
            return
        rate = self._samples_per_step / report.seconds if report.seconds else 0.0
        self._write("step", {**dataclasses.asdict(report), "samples_per_second": rate})
        self._scalars(
            report.step, {"train/loss": report.loss, "train/learning rate": report.lr, "train/samples per second": rate}
        )

    def tested(self, reading: Reading) -> None:
        self._write("test", dataclasses.asdict(reading))
        self._scalars(reading.step, {f"test/{name}": value for name, value in reading.figures.items()})

    def epoch(self, report: EpochReport) -> None:
        self._write("epoch", report.to_dict())
        costs = report.costs
        self._scalars(
            report.step,
            {
                **{f"test/{name}": value for name, value in report.figures.items()},
                "epoch/training loss": report.train_loss,
                "epoch/seconds": report.seconds,
                "epoch/samples per second": report.samples_per_second,
                "time/computing": report.seconds_computing,
                "time/selecting": costs.seconds_selecting,
                "time/waiting": costs.seconds_waiting,
                "time/transferring": costs.seconds_transferring,
                "sync/bytes sent": costs.bytes_sent,
                "sync/density": costs.density,
            },
        )

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        with (self._folder / FILE).open("a", encoding="utf-8") as file:
            file.write(to_json({"kind": kind, "time": time.time(), **record}) + "\n")

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def _forget_after(self, step: int) -> None:
        """Drop what an interrupted run wrote after its checkpoint: it will be written again."""
        path = self._folder / FILE
        if not path.exists():
            return
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_up_to(line, step)]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _is_up_to(line: str, step: int) -> bool:
    try:
        return int(json.loads(line).get("step", 0)) <= step
    except (ValueError, AttributeError):
        return False  # cut off when the run was killed
