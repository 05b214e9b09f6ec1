"""examples/local_updates.py: a training loop as people write it, with the one line of spardl."""

import re
from pathlib import Path

import pytest

import spardl.integrations.attach
from commands import environment, spardl
from forked import run_forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_updates.py"


def read(text: str) -> tuple[float, str, float]:
    """Validation loss, a sum of all shared weights, and the share of the weights' bytes that a step sends."""
    said = re.fullmatch(
        r"step \d+: validation loss (\S+), weights (\S+)\n(\d+) bytes per step for (\d+) weights\n", text
    )
    assert said is not None, text
    loss, weights, sent, elements = said.groups()
    return float(loss), weights, float(sent) / (4 * float(elements))


def test_it_learns_and_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    options = ("--folder", tmp_path, "--steps", 24)
    loss, weights, share = read(run_forked(EXAMPLE, 2, *options))
    assert loss < 4.2  # a guess among 120 characters has 4.8
    assert share < 0.05
    run_forked(EXAMPLE, 2, *options, "--stop-after", 9)
    assert read(run_forked(EXAMPLE, 2, *options, "--resume"))[1] == weights


@pytest.mark.slow  # under torchrun itself, which starts torch once more per rank
def test_its_command_runs(tmp_path: Path) -> None:
    launcher = ("--standalone", "--nproc-per-node", 2, EXAMPLE, "--folder", tmp_path, "--steps", 4)
    done = spardl(*launcher, module="torch.distributed.run", cwd=tmp_path, env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stderr
    read(done.stdout)
