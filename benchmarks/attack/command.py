"""Trials of the real command: `spardl train` with ranks of its own, a fault from outside, and `--resume auto`.

How it ends is what a person sees: an exit code, a sentence, no process that stays, and, in the end, the weights of a
run that nothing happened to.
"""

import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attack.plan import Trial

STEPS, EVERY = 60, 10  # of a run, and between two checkpoints
PATIENCE_S = 90.0  # for a command to come to its end; beyond, it hangs
GRACE_S = 5.0  # in which no process of a run that has ended may be left
SMALL = 4096  # bytes that fit a full disk
MARK = "SPARDL_ATTACKED"  # a variable by which the processes of a run are known


@dataclass
class End:
    """How a command has ended. `left`: processes that were still there a while later; `struck`: whether it came to
    what was to happen to it."""

    code: int | None
    said: str
    sha: str | None
    left: int
    struck: bool = True

    @property
    def is_clean(self) -> bool:
        """Whether a person was told what happened, in a sentence."""
        return self.code is not None and "Traceback" not in self.said


class Command:
    """`spardl train` with the settings of a trial, in a folder."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        settings = {"density": 0.1, **{k: v for k, v in trial.settings.items() if k in ("method", "update", "groups")}}
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._folder, self._mark = folder, secrets.token_hex(8)
        self._command = [sys.executable, "-m", "spardl", "train", "--workers", str(trial.workers), *options]
        self._command += ["--save-every", str(EVERY), "--eval-every", "0", "--json", "-", "--resume", "auto"]
        self._command += ["--checkpoint-dir", str(folder / "run"), "--timeout", str(max(10.0, trial.timeout))]

    def run(self, *, steps: int = STEPS, strike: Callable[[int], bool] | None = None, full: bool = False) -> End:
        """Start it, and see to its end. `strike` is asked again and again, with the launcher's pid, until it has
        struck; `full`: nothing large can be written."""
        with (self._folder / "said").open("w+") as errors:
            process = subprocess.Popen(
                [*self._command, "--max-steps", str(steps)],
                stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, MARK: self._mark},
                preexec_fn=_fill_the_disk if full else None,
            )  # fmt: skip
            deadline, struck = time.monotonic() + PATIENCE_S, strike is None
            while process.poll() is None and time.monotonic() < deadline:
                struck = struck or (strike is not None and strike(process.pid))
                time.sleep(0.01)
            code = process.poll()
            if code is None:
                process.kill()
            out = process.communicate()[0]
            left = self._left()
            errors.seek(0)
            return End(code, errors.read(), _sha(out), left, struck)

    def _left(self) -> int:
        """Processes of this run that stay; they are ended here."""
        deadline = time.monotonic() + GRACE_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def processes(self) -> list[int]:
        """Those of this run, the launcher included; a process that has ended and was not fetched yet is none."""
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self._mark}".encode() in place.read_bytes():
                    found.append(int(place.parent.name))
        return found

    def checkpoints(self) -> list[Path]:
        """Those that are whole, by step."""
        return sorted(path.parent for path in (self._folder / "run").rglob("meta.json") if ".partial" not in str(path))


def _fill_the_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))


def _sha(out: str) -> str | None:
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "parameters_sha256" in found:
                return str(found["parameters_sha256"])
    return None


def strike_of(command: Command, trial: Trial) -> Callable[[int], bool]:
    """Kill the launcher, or some of its ranks, once the first checkpoint is there."""

    def strike(launcher: int) -> bool:
        if not command.checkpoints():
            return False
        if trial.place == "launcher":
            os.kill(launcher, signal.SIGKILL)
            return True
        ranks = [pid for pid in _children(launcher) if pid in command.processes()]
        if len(ranks) < trial.workers:
            return False
        for victim in trial.victims:
            os.kill(sorted(ranks)[victim], signal.SIGKILL)
        return True

    return strike


def _children(pid: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(place.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(place.parent.name))
    return found


def damage(checkpoint: Path, how: int) -> None:
    """Change one bit of a file in it, cut one off, or take one away."""
    path = sorted(checkpoint.glob("*.pt"))[how % 2]
    content = bytearray(path.read_bytes())
    if how % 3 == 0:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how % 3 == 1:
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()


def attack_command(trial: Trial, folder: Path, expected: str, note: Callable[..., None]) -> None:
    """Carry it out, and note what has come of it."""
    command = Command(trial, folder)
    strike = _kill if trial.place in ("launcher", "rank") else _spoil
    if not strike(command, trial, note):
        return
    last = command.run()
    same = last.code == 0 and last.sha == expected
    note("resumed exactly" if same else "not resumed", f"{last.code}, {last.said[-300:]}, {last.sha}")
    if last.left:
        note("hang", f"{last.left} processes stayed after a run that went on")


def _kill(command: Command, trial: Trial, note: Callable[..., None]) -> bool:
    """Run it, and kill its launcher or a rank on the way; whether it came to that."""
    end = command.run(strike=strike_of(command, trial))
    if end.struck:
        _judge(end, trial, note)
    else:
        note("never struck" if end.code == 0 else "failed before the fault", f"exit {end.code}: {end.said[-600:]}")
    return end.struck


def _spoil(command: Command, trial: Trial, note: Callable[..., None]) -> bool:
    """Run half of it; then fill the disk under the other half, or damage the last checkpoint; whether that was there
    to be damaged."""
    half = command.run(steps=STEPS // 2)
    if half.code != 0 or not command.checkpoints():
        note("failed before the fault", f"the first half: exit {half.code}: {half.said[-600:]}")
        return False
    if trial.place == "disk":
        _judge(command.run(full=True), trial, note)
    else:
        damage(command.checkpoints()[-1], trial.seed)
    return True


def _judge(end: End, trial: Trial, note: Callable[..., None]) -> None:
    """A run that was struck: nothing stays, and somebody who is left says what happened."""
    if end.code is None or end.left:
        note("hang", f"{end.left} processes stayed; {end.said[-300:]}")
    if trial.place == "launcher":
        note("killed")  # nobody is left who could say anything
        return
    if not end.is_clean or end.code == 0:
        note("did not notice" if end.code == 0 else "raw error", f"exit {end.code}: {end.said[-600:]}")
        return
    note("its own error")
    if trial.place == "rank":
        named = any(f"rank {victim}" in end.said for victim in trial.victims)
        note("right name" if named else "no name", end.said[-400:])


def undisturbed(trial: Trial, folder: Path) -> Any:
    """What the same command comes to when nothing happens."""
    return Command(trial, folder).run()
