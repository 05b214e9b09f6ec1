"""When a run is saved, where, and what it goes on from: checked before anything starts. No torch here."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from spardl.choices import is_count
from spardl.errors import ConfigError

DEFAULT_SECONDS = 600.0
DEFAULT_KEEP = 3

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Every:
    """How often: every `steps` steps, or every `seconds` seconds."""

    steps: int | None = None
    seconds: float | None = DEFAULT_SECONDS

    @classmethod
    def parse(cls, text: str) -> Self:
        """`100` is a number of steps; `30s`, `5m` and `2h` are times."""
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", text)
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if number <= 0 or (not unit and number != int(number)):
            raise ConfigError(f"save-every {text} is neither steps nor a time; write it as 100, 30s, 5m or 2h.")
        return cls(steps=None, seconds=number * UNITS[unit]) if unit else cls(steps=int(number), seconds=None)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where and when a run is saved, and what it goes on from.

    folder  where checkpoints go, one folder each; None saves nothing
    every   when, beside at the end and when asked to stop
    keep    how many of the last ones stay
    resume  what to go on from: None begins anew; "latest" is the last whole one in the folder, "auto" the same if there
            is any; otherwise the path of one, or of a folder that holds some
    """

    folder: Path | None = None
    every: Every = Every()
    keep: int = DEFAULT_KEEP
    resume: str | None = None

    def check(self) -> None:
        """Refuse what cannot work, and what would mix two runs in one folder."""
        if not is_count(self.keep, least=1):
            raise ConfigError(f"keeping {self.keep} checkpoints leaves none to go on from; keep 1 or more.")
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"checkpoints cannot go to {self.folder}: it is a file; name a folder.")
        if self.resume is None:
            found = steps_in(self.folder) if self.folder is not None else []
            if found:
                raise ConfigError(
                    f"{self.folder} holds checkpoints of an earlier run, the last one at step {found[-1]};"
                    " go on with --resume, or choose another folder."
                )
        elif self.resume in ("latest", "auto"):
            if self.folder is None:
                raise ConfigError(f"--resume {self.resume} does not know where to look; add --checkpoint-dir.")
            if self.resume == "latest" and not steps_in(self.folder):
                raise ConfigError(
                    f"there is no checkpoint in {self.folder} to go on from; leave --resume out to begin."
                )
        elif not Path(self.resume).is_dir():
            raise ConfigError(f"there is no checkpoint {self.resume}; name its folder, or leave the name out.")
        elif not is_checkpoint(Path(self.resume)) and not steps_in(Path(self.resume)):
            raise ConfigError(
                f"{self.resume} is no checkpoint and holds none; they are called {checkpoint_name(120)} and the like."
            )


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def is_checkpoint(folder: Path) -> bool:
    """By its name alone: only what is whole bears it."""
    return re.fullmatch(r"step-[0-9]{8,}", folder.name) is not None


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(step_of(each) for each in folder.iterdir() if is_checkpoint(each) and each.is_dir())
