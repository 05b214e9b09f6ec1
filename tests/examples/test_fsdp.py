"""examples/fsdp.py: a model in parts, sparse between replicas, with checkpoints of torch.distributed.checkpoint."""

import re
from pathlib import Path

import pytest

# What the script imports is imported once, before processes part.
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

import spardl.integrations.attach  # noqa: F401
from commands import environment
from commands import spardl as command
from forked import run_forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp.py"


def read(text: str) -> tuple[float, str, float]:
    """Validation loss, a sum of all shared weights, and the share of a part's bytes that a step sends."""
    said = re.fullmatch(
        r"step \d+: validation loss (\S+), weights (\S+)\n(\d+) bytes per step for the (\d+) weights of this part\n",
        text,
    )
    assert said is not None, text
    loss, weights, sent, elements = said.groups()
    return float(loss), weights, float(sent) / (4 * float(elements))


def test_it_learns(tmp_path: Path) -> None:
    loss, _, share = read(run_forked(EXAMPLE, 4, "--steps", 12, "--folder", tmp_path / "checkpoint"))
    assert loss < 4.5  # a guess among 120 characters has 4.8
    assert share < 0.05


@pytest.mark.slow  # integrations/test_sharded.py resumes such models
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    options = ("--steps", 12, "--folder", tmp_path / "checkpoint")
    _, weights, _ = read(run_forked(EXAMPLE, 4, *options))
    run_forked(EXAMPLE, 4, *options, "--stop-after", 5)
    assert read(run_forked(EXAMPLE, 4, *options, "--resume"))[1] == weights


@pytest.mark.slow  # the same script under torchrun, which starts torch four times
def test_its_command_runs(tmp_path: Path) -> None:
    launcher = ("--standalone", "--nproc-per-node", 4, EXAMPLE, "--steps", 2, "--folder", tmp_path / "checkpoint")
    done = command(*launcher, module="torch.distributed.run", cwd=tmp_path, env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stderr
    read(done.stdout)
