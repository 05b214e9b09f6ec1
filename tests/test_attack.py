"""A minute of attacks: whatever strikes a rank is named by the others, and the run goes on exactly where it was saved.

`make attack` has all kinds, and judges times too.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.attack")  # not part of the source distribution

from benchmarks.attack.__main__ import read
from benchmarks.attack.command import attack_command
from benchmarks.attack.lab import Loopback
from benchmarks.attack.plan import KINDS, Trial, trial_of
from benchmarks.attack.table import table
from benchmarks.attack.trial import Attacker, Finding

from commands import environment

ROOT = Path(__file__).parent.parent


def test_a_seed_gives_the_same_trial_again() -> None:
    for seed in range(200):
        trial = trial_of(seed)
        assert trial == trial_of(seed)
        assert len(set(trial.victims)) == trial.fault.victims < trial.workers
    assert {trial_of(seed).kind for seed in range(400)} == {kind.name for kind in KINDS}


def test_the_table_counts_what_was_found_by_kind() -> None:
    first, second = Finding(trial_of(0)), Finding(trial_of(0))
    first.note("right name")
    second.note("wrong name", "rank 1: it was rank 2")
    assert first.is_fine and not second.is_fine
    assert f"| {trial_of(0).kind} | 2 | 1 |" in table([first, second])
    assert second.remarks == ["wrong name: rank 1: it was rank 2"]


def test_what_was_found_is_read_again_and_a_seed_that_was_tried_twice_counts_once(tmp_path: Path) -> None:
    first, second, other = Finding(trial_of(7)), Finding(trial_of(7)), Finding(trial_of(3), seconds=2.0)
    first.note("hang", "rank 1")
    second.note("right name")
    for name, findings in {"before": [first], "after": [second, other]}.items():
        (tmp_path / name).write_text("".join(json.dumps(each.to_dict()) + "\n" for each in findings))
    assert read([str(tmp_path / "before"), str(tmp_path / "after")]) == [other, second]


FINISHED = {"what": "finished", "sha": "the same"}
FAILED = {
    "what": "error",
    "type": "PeerError",
    "ours": True,
    "text": "rank 2 of 3 never came within 3 s",
}
TAKEN = {"what": "error", "type": "ConfigError", "ours": True, "text": "port 1 is in use; set MASTER_PORT to another"}


def seeded(kind: str) -> Trial:
    """The first trial whose kind's name begins so."""
    return next(trial for seed in itertools.count() if (trial := trial_of(seed)).kind.startswith(kind))


def attack(monkeypatch: pytest.MonkeyPatch, trial: Trial, *runs: dict[str, Any]) -> Finding:
    """A trial in whose runs, one after the other, all ranks end like this, and the fault never strikes."""
    left = list(runs)
    monkeypatch.setattr(Attacker, "_run", lambda *_, **__: [left.pop(0)] * trial.workers)
    found = Attacker(Loopback()).attack(trial)
    assert not left, "fewer runs than were foreseen"
    return found


def test_a_run_that_fails_before_its_fault_is_a_failure_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = seeded("kill -9 in a round")
    found = attack(monkeypatch, trial, FINISHED, FAILED, FINISHED)  # without a fault, with it, and from a checkpoint
    assert found.counts == {"failed before the fault": trial.workers, "resumed exactly": trial.workers}
    assert not found.is_fine and "never came" in found.remarks[0]
    assert "failed before the fault |" in table([found])


def test_an_undisturbed_run_that_fails_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = seeded("kill -9 in a round")
    assert attack(monkeypatch, trial, FAILED).counts == {"failed before the fault": trial.workers}


def test_a_run_that_finds_its_port_taken_is_begun_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = seeded("stopped for less")
    found = attack(monkeypatch, trial, TAKEN, FINISHED, TAKEN, TAKEN, TAKEN)
    assert found.counts == {"retried": 4, "failed before the fault": trial.workers}
    assert "| retried |" in table([found])


def test_a_fault_that_never_strikes_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = seeded("the wall clock jumps")
    found = attack(monkeypatch, trial, FINISHED, FINISHED)
    assert found.counts == {"never struck": 1} and not found.is_fine


@pytest.mark.parametrize("kind", ["spardl train: launcher", "spardl train: disk"])
def test_a_command_that_fails_before_its_fault_is_a_failure(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = seeded(kind)
    monkeypatch.setattr("benchmarks.attack.command.sys.executable", "/bin/false")
    found = Finding(trial)
    attack_command(trial, tmp_path, "", found.note)
    assert found.counts == {"failed before the fault": 1}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("only", "trials", "timeout"),
    [
        ("kill -9 in", 1, 60),
        ("stopped for longer, in a round", 1, 6),
        pytest.param("kill -9 in", 8, 60, marks=pytest.mark.slow),
        pytest.param("exception", 2, 60, marks=pytest.mark.slow),
    ],
)
def test_nothing_goes_wrong_in_a_few_attacks(only: str, trials: int, timeout: int) -> None:
    """On one host and without a stop-watch, so that it can be told from a slow machine. Another seed every time."""
    seed = random.SystemRandom().randrange(1 << 31)
    options = ["--loopback", "--untimed", "--only", only, "--trials", trials, "--timeout", timeout, "--seed", seed]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attack", *map(str, options)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {trials} |" in done.stdout
