"""examples/restart.py: a rank dies, torchrun starts all of them again, and the run ends as if nothing had happened."""

import re
from pathlib import Path

import pytest

from commands import environment, spardl
from forked import run_forked

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "restart.py"


def read(text: str) -> tuple[str, str, str]:
    """The attempt that came through, where it began, and a sum of all weights."""
    said = re.fullmatch(r"attempt (\d), from (.*): loss \S+, weights (\S+)\n", text)
    assert said is not None, text
    return said[1], said[2], said[3]


def run(folder: Path, *options: object) -> tuple[str, str, str]:
    launcher = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1, EXAMPLE)
    checkpoint = ("--checkpoint", folder / "restart.pt", "--steps", 25)
    variables = environment(OMP_NUM_THREADS=1)
    done = spardl(*launcher, *checkpoint, *options, module="torch.distributed.run", cwd=folder, env=variables)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def test_a_run_that_ended_early_goes_on_where_it_had_saved(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    whole = read(run_forked(EXAMPLE, 2, "--checkpoint", tmp_path / "whole.pt", "--steps", 25))
    run_forked(EXAMPLE, 2, "--checkpoint", tmp_path / "restart.pt", "--steps", 10)
    rest = read(run_forked(EXAMPLE, 2, "--checkpoint", tmp_path / "restart.pt", "--steps", 25))
    assert whole[1:] == ("the beginning", rest[2]) and rest[1] == "step 10"


def test_what_the_tutorial_shows_of_it_is_in_it() -> None:
    """Letter by letter."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").partition("## 6. ")[2]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    assert all(block in EXAMPLE.read_text(encoding="utf-8") for block in blocks)


@pytest.mark.slow  # torch is started six times
def test_a_run_whose_rank_was_killed_once_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """To the last bit of the sum of all weights."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    attempt, begun, weights = run(tmp_path / "whole")
    assert (attempt, begun) == ("0", "the beginning")
    assert run(tmp_path / "killed", "--die-at", 17) == ("1", "step 10", weights)
