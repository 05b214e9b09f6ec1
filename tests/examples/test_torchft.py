"""examples/torchft_quorum.py: one of three replicas is killed, and torchft's quorum and the training go on."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_quorum.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed: pip install torchft"
)


@pytest.mark.parametrize("dies", [0, 2])
def test_those_that_are_left_go_on_over_the_group_of_the_next_quorum(dies: int) -> None:
    """Which one is killed makes no difference; those that are left end with the same weights."""
    command = [sys.executable, str(EXAMPLE), "--die-at", "25", "--dies", str(dies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stderr
    sizes = re.findall(r"after (\d+) steps: (\d) replicas", done.stdout)
    assert sizes == [("10", "3"), ("20", "3"), ("30", "2"), ("40", "2"), ("50", "2")]
    ended = re.findall(r"replica (\d) is (\d) of 2: weights (\S+)", done.stdout)
    assert {int(number) for number, _, _ in ended} == {0, 1, 2} - {dies}
    assert len({weights for _, _, weights in ended}) == 1
