"""A minute of attacks: whatever strikes a rank is named by the others, and the run goes on exactly where it was saved.

`make attack` has all kinds, and judges times too.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.attack")  # not part of the source distribution

from benchmarks.attack.plan import KINDS, trial_of
from benchmarks.attack.table import table
from benchmarks.attack.trial import Finding

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("only", "trials", "timeout"),
    [
        ("kill -9 in", 2, 60),
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
