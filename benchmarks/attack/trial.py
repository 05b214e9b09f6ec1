"""One trial carried out: ranks are started, the fault strikes, and everybody's end is looked at."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.attack.command import attack_command, undisturbed
from benchmarks.attack.lab import Lab
from benchmarks.attack.plan import EVERY, STEPS, Trial
from benchmarks.attack.rank import be_rank

LONGEST = 12  # times its timeout: what a run may take in all; beyond, it hangs
DAMAGED = 12  # the step of a checkpoint that is tampered with
ATTEMPTS = 3  # at a run that failed because of the machine, such as a port that was taken; each is counted
IN_TIME_S = 2.0  # after the timeout, within which a survivor's error must come

# What can be found about a trial, by rank or as a whole.
FINE = ("right name", "among candidates", "right weights", "resumed exactly", "residuals intact", "in time",
        "its own error", "killed")  # fmt: skip
FOUL = ("hang", "wrong name", "no name", "raw error", "wrong weights", "not resumed", "residuals changed", "too late",
        "did not notice", "failed before the fault", "never struck")  # fmt: skip
COUNTED = ("retried",)  # neither: the machine was in the way, and the run was begun again
TAKEN = ("EADDRINUSE", "address already in use", "is in use; set MASTER_PORT")  # what is said of a port that is taken


@dataclass
class Finding:
    """What has come of a trial: how often each of `FINE` and `FOUL`, and sentences about what was foul."""

    trial: Trial
    counts: "Counter[str]" = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {**self.trial.to_dict(), "counts": self.counts, "remarks": self.remarks, "seconds_taken": self.seconds}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Finding":
        """The finding that `to_dict` was asked of."""
        own = {name: record[name] for name in ("counts", "remarks", "seconds_taken")}
        trial = Trial(**{k: tuple(v) if k == "victims" else v for k, v in record.items() if k not in own})
        return cls(trial, Counter(own["counts"]), own["remarks"], own["seconds_taken"])

    def note(self, what: str, remark: str = "") -> None:
        self.counts[what] += 1
        if what in FOUL:
            self.remarks.append(f"{what}: {remark}")

    @property
    def is_fine(self) -> bool:
        return not any(self.counts[what] for what in FOUL)

    def note_early(self, ends: list[dict[str, Any]], what: str) -> None:
        """A run has failed to which nothing had happened yet: a failure like any other, of each rank that has one."""
        for rank, end in enumerate(ends):
            if end["what"] == "hang":
                self.note("hang", f"{what}, rank {rank} was still there at the end")
            elif end["what"] != "finished":
                self.note("failed before the fault", f"{what}, rank {rank}: {end}")


class Attacker:
    """Carries out trials, one after the other, and knows what undisturbed runs come to."""

    def __init__(self, lab: Lab, *, timed: bool = True) -> None:
        self._lab = lab
        self._timed = timed
        self._expected: dict[tuple[str, int], str] = {}

    def attack(self, trial: Trial) -> Finding:
        """Do it, look at what is left, and go on from the last checkpoint."""
        finding, started = Finding(trial), time.monotonic()
        expected = self._reference(finding)
        folder = Path(tempfile.mkdtemp(prefix="attack-"))
        try:
            if expected is not None:
                self._carry_out(finding, folder, expected)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        finding.seconds = time.monotonic() - started
        return finding

    def _carry_out(self, finding: Finding, folder: Path, expected: str) -> None:
        trial = finding.trial
        if trial.fault.what == "command":
            attack_command(trial, folder, expected, finding.note)
            return
        ends = self._run_on_damaged(finding, folder) if trial.fault.what == "file" else self._disturb(finding, folder)
        if ends is not None:
            self._judge(finding, ends, expected)
        if not trial.fault.harmless and trial.fault.what != "lose":
            self._resume(finding, folder, expected)

    def _disturb(self, finding: Finding, folder: Path) -> list[dict[str, Any]] | None:
        """Run it until the fault has struck and everybody has ended; None if it never has, which is noted."""
        trial = finding.trial
        ends = self._try(finding, folder, disturbed=True)
        if any(word["what"] == "struck" for victim in trial.victims for word in _diary(folder, victim)):
            return ends
        finding.note_early(ends, "the run to be disturbed")
        if all(end["what"] == "finished" for end in ends):
            finding.note("never struck", f"all ranks came to their end, and none to {trial.place}")
        return None

    def _reference(self, finding: Finding) -> str | None:
        """What the run of a trial comes to when nothing happens to it; None if it fails, which is noted."""
        trial = finding.trial
        command = trial.fault.what == "command"
        key = (f"{command} {trial.run}", trial.workers)
        if key not in self._expected:
            with tempfile.TemporaryDirectory(prefix="attack-") as folder:
                sha = (
                    self._undisturbed_command(finding, Path(folder))
                    if command
                    else self._undisturbed(finding, Path(folder))
                )
            if sha is None:
                return None
            self._expected[key] = sha
        return self._expected[key]

    def _undisturbed_command(self, finding: Finding, folder: Path) -> str | None:
        end = undisturbed(finding.trial, folder)
        if end.sha is None:
            finding.note("failed before the fault", f"an undisturbed command: exit {end.code}: {end.said[-600:]}")
        return end.sha

    def _undisturbed(self, finding: Finding, folder: Path) -> str | None:
        ends = self._try(finding, folder)
        finding.note_early(ends, "an undisturbed run")
        sums = {end.get("sha") for end in ends}
        if None not in sums and len(sums) > 1:
            finding.note("wrong weights", f"ranks of an undisturbed run differ: {ends}")
        return sums.pop() if len(sums) == 1 else None

    # --- running --------------------------------------------------------------------------------------------------

    def _try(self, finding: Finding, folder: Path, **how: Any) -> list[dict[str, Any]]:
        """Run it; again, and counted, only where the machine was in the way for certain: another had its port."""
        for _ in range(ATTEMPTS):
            ends = self._run(finding.trial, folder, **how)
            if not port_was_taken(ends):
                break
            finding.note("retried")
        return ends

    def _run(self, trial: Trial, folder: Path, *, resume: int = 0, disturbed: bool = False) -> list[dict[str, Any]]:
        """Start all ranks and see to their end; the last word of each."""
        for old in folder.glob("rank-*.jsonl"):
            old.unlink()
        place, deadline = self._lab.place(), time.monotonic() + LONGEST * trial.timeout
        how = {"resume": resume, "disturbed": disturbed}
        ranks = {self._start(rank, trial, place, folder, how): rank for rank in range(trial.workers)}
        alive, due = dict(ranks), dict[int, float]()
        try:
            while alive and time.monotonic() < deadline:
                for pid in list(alive):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        del alive[pid]
                if disturbed:
                    self._strike(trial, folder, {rank: pid for pid, rank in ranks.items()}, alive, due)
                time.sleep(0.01)
        finally:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for rank in due:
                self._lab.mend(rank)
        hanging = set(alive.values())
        return [{"what": "hang"} if rank in hanging else _last_word(folder, rank) for rank in range(trial.workers)]

    def _start(self, rank: int, trial: Trial, place: dict[str, Any], folder: Path, how: dict[str, Any]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._lab.enter(rank)
            with (folder / f"rank-{rank}.err").open("a") as errors:
                os.dup2(errors.fileno(), 2)
            be_rank(rank, trial, place, folder, **how)
        finally:
            os._exit(70)

    def _strike(
        self, trial: Trial, folder: Path, pids: dict[int, int], alive: dict[int, int], due: dict[int, float]
    ) -> None:
        """What the attacker does from outside: let a rank go on that has stopped, cut and mend lines."""
        kind, now = trial.fault, time.monotonic()
        if kind.what not in ("stop", "link"):
            return
        for rank in trial.victims:
            if rank not in due and any(word["what"] == "struck" for word in _diary(folder, rank)):
                due[rank] = now + kind.lasts * trial.timeout
                if kind.what == "link":
                    self._lab.cut(rank, kind.rate)
            elif rank in due and now > due[rank] > 0:
                due[rank] = -1.0
                if kind.what == "link":
                    self._lab.mend(rank)
                elif pids[rank] in alive:
                    os.kill(pids[rank], signal.SIGCONT)

    def _run_on_damaged(self, finding: Finding, folder: Path) -> list[dict[str, Any]] | None:
        """Go on from a checkpoint of which one rank's file is not what it should be. The one before is whole.

        None if the run that was to leave it has failed, which is noted."""
        trial = finding.trial
        ends = self._try(finding, folder)
        if any(end["what"] != "finished" for end in ends):
            finding.note_early(ends, "the run whose checkpoint is damaged")
            return None
        for step in range(DAMAGED + EVERY, STEPS + 1, EVERY):
            for file in folder.glob(f"step-{step}-rank-*.pt"):
                file.unlink()
        (victim,) = trial.victims
        other = (victim + 1) % trial.workers
        path = folder / f"step-{DAMAGED}-rank-{victim}.pt"
        damage(path, folder / f"step-{DAMAGED}-rank-{other}.pt", trial.place)
        ends = self._try(finding, folder, resume=DAMAGED)
        path.unlink()
        return ends

    # --- judging --------------------------------------------------------------------------------------------------

    def _judge(self, finding: Finding, ends: list[dict[str, Any]], expected: str) -> None:
        trial = finding.trial
        for rank, end in enumerate(ends):
            struck = rank in trial.victims
            if end["what"] == "hang":
                finding.note("hang", f"rank {rank} was still there after {LONGEST * trial.timeout:g} s")
            elif trial.fault.what == "lose":
                self._judge_survivor(finding, rank, end, ends)
            elif trial.fault.harmless:
                same = end.get("sha") == expected or (trial.run == "merged" and end["what"] == "finished")
                finding.note("right weights" if same else "wrong weights", f"rank {rank}: {end}")
            elif struck and trial.fault.what == "file":
                finding.note("its own error" if end.get("ours") else "raw error", f"rank {rank}: {end}")
            elif struck and trial.fault.what in ("kill", "raise", "memory", "disk"):
                finding.note("killed" if trial.fault.what == "kill" else "its own error")
            elif end["what"] != "error":
                finding.note("did not notice", f"rank {rank}: {end}")
            else:
                self._judge_error(finding, rank, end)

    def _judge_survivor(self, finding: Finding, rank: int, end: dict[str, Any], ends: list[dict[str, Any]]) -> None:
        """Whoever is left comes to the end, all with the same weights."""
        victims = finding.trial.victims
        if rank in victims:
            finding.note("killed")
            return
        same = "sha" in end and {other.get("sha") for i, other in enumerate(ends) if i not in victims} == {end["sha"]}
        finding.note("right weights" if same else "wrong weights", f"rank {rank}: {end}")

    def _judge_error(self, finding: Finding, rank: int, end: dict[str, Any]) -> None:
        said, victims = f"rank {rank}: {end['text']}", set(finding.trial.victims)
        if not end["ours"]:
            finding.note("raw error", f"{end['type']}, {said}")
        elif end["peer"] in victims:
            finding.note("right name")
        elif victims <= set(end["candidates"]):  # it cannot be known from there, and the text says so
            finding.note("among candidates")
        else:
            finding.note("no name" if end["peer"] is None else "wrong name", said)
        finding.note("residuals intact" if end["intact"] else "residuals changed", said)
        if rank not in victims and self._timed:
            late = end["waited"] > finding.trial.timeout + IN_TIME_S + finding.trial.fault.bought
            finding.note("too late" if late else "in time", f"{end['waited']:.1f} s, {said}")

    def _resume(self, finding: Finding, folder: Path, expected: str) -> None:
        """All ranks go on from the last checkpoint that is whole, and end with the weights of an undisturbed run."""
        trial = finding.trial
        steps = [step for step in range(EVERY, STEPS + 1, EVERY) if _is_whole(folder, step, trial.workers)]
        ends = self._try(finding, folder, resume=max(steps, default=0))
        for rank, end in enumerate(ends):
            # How layers are merged depends on times, so a run that plans anew may add in another order.
            same = end.get("sha") == expected or (trial.run == "merged" and "sha" in end)
            finding.note("resumed exactly" if same else "not resumed", f"rank {rank}: {end}")


def port_was_taken(ends: list[dict[str, Any]]) -> bool:
    """Whether a run has failed because somebody else listened where its ranks were to meet."""
    return any(sign in end.get("text", "") for end in ends for sign in TAKEN)


def damage(path: Path, other: Path, how: str) -> None:
    """Make one rank's file another rank's, one of another world, or one with a value that is not finite."""
    saved = torch.load(other if how == "swapped" else path, weights_only=True)
    if how == "foreign":
        saved["sync"]["workers"] += 1
    elif how == "not finite":
        next(iter(saved["sync"]["residuals"].values()))[0] = torch.nan
    torch.save(saved, path)


def _is_whole(folder: Path, step: int, workers: int) -> bool:
    return all((folder / f"step-{step}-rank-{rank}.pt").exists() for rank in range(workers))


def _diary(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _last_word(folder: Path, rank: int) -> dict[str, Any]:
    words = _diary(folder, rank)
    return words[-1] if words else {"what": "nothing"}
