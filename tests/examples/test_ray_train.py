"""examples/ray_train.py: Ray Train starts the workers, loses one, and starts them again where they had saved."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import environment
from frameworks import needs

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"

pytestmark = [needs("ray"), pytest.mark.slow, pytest.mark.timeout(240)]


def run(folder: Path, *options: object) -> tuple[str, float, str]:
    """Where the attempt that came through began, its loss, and a sum of all weights."""
    command = [sys.executable, EXAMPLE, "--folder", folder, "--steps", 25, *options]
    variables = environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path), OMP_NUM_THREADS=1)
    done = subprocess.run([str(each) for each in command], env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = re.search(r"^from (.*): validation loss (\S+), weights (\S+)$", done.stdout, re.MULTILINE)
    assert said is not None, done.stdout
    return said[1], float(said[2]), said[3]


def test_a_run_that_lost_a_worker_ends_with_the_weights_of_one_that_did_not(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    begun, loss, weights = run(tmp_path / "whole")
    assert begun == "the beginning" and loss < 2.3
    assert run(tmp_path / "killed", "--die-at", 17) == ("step 10", loss, weights)
