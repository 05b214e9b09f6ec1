"""examples/restart.py: a rank dies, torchrun starts all of them again, and the run ends as if nothing had happened."""

import re
from pathlib import Path

import pytest

from commands import environment, spardl

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart.py"


def run(folder: Path, *options: object) -> tuple[str, str, str]:
    """The attempt that came through, where it began, and a sum of all weights."""
    launcher = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1, EXAMPLE)
    checkpoint = ("--checkpoint", folder / "restart.pt", "--steps", 25)
    variables = environment(OMP_NUM_THREADS=1)
    done = spardl(*launcher, *checkpoint, *options, module="torch.distributed.run", cwd=folder, env=variables)
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"attempt (\d), from (.*): loss \S+, weights (\S+)\n", done.stdout)
    assert said is not None, done.stdout
    return said[1], said[2], said[3]


@pytest.mark.slow  # torch is started six times
def test_a_run_whose_rank_was_killed_once_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    attempt, begun, weights = run(tmp_path / "whole")
    assert (attempt, begun) == ("0", "the beginning")
    assert run(tmp_path / "killed", "--die-at", 17) == ("1", "step 10", weights)
