"""examples/local_updates.py: a training loop as people write it, with the one line of spardl."""

import re
from pathlib import Path

from commands import environment, spardl

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_updates.py"


def run(folder: Path, *options: object) -> tuple[float, str, float]:
    """Validation loss, a sum of all shared weights, and the share of the weights' bytes that a step sends."""
    launcher = ("--standalone", "--nproc-per-node", 2, EXAMPLE, "--folder", folder, *options)
    done = spardl(*launcher, module="torch.distributed.run", cwd=folder, env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(
        r"step \d+: validation loss (\S+), weights (\S+)\n(\d+) bytes per step for (\d+) weights\n", done.stdout
    )
    assert said is not None, done.stdout
    loss, weights, sent, elements = said.groups()
    return float(loss), weights, float(sent) / (4 * float(elements))


def test_it_learns_and_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    options = ("--steps", 24)
    loss, weights, share = run(tmp_path, *options)
    assert loss < 4.2  # a guess among 120 characters has 4.8
    assert share < 0.05
    run(tmp_path, *options, "--stop-after", 9)
    assert run(tmp_path, *options, "--resume")[1] == weights
