"""The complete script of the tutorial is examples/ddp.py, and it runs as it is printed."""

import re
from pathlib import Path

import pytest
import torch

from commands import environment, spardl
from forked import run_forked

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp.py"


def test_the_script_in_the_tutorial_is_the_example() -> None:
    """Letter by letter, so what is tested below is what people copy."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"## 4. The smallest complete script\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert printed == EXAMPLE.read_text(encoding="utf-8")


def test_it_trains_with_two_workers_and_leaves_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns, sends a small share of the gradient, and saves all ranks' residuals in one file."""
    monkeypatch.chdir(tmp_path)
    printed = run_forked(EXAMPLE, 2)
    said = re.fullmatch(r"loss (\S+); (\d+) bytes per step for (\d+) elements\n", printed)
    assert said is not None, printed
    loss, sent, elements = map(float, said.groups())
    assert loss < 1.8  # a guess among ten labels has 2.3
    assert sent < 0.05 * 4 * elements
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert sorted(checkpoint) == ["model", "optimizer", "sync"]
    assert [each["rank"] for each in checkpoint["sync"]["ranks"]] == [0, 1]


@pytest.mark.slow  # the same script under torchrun, which starts torch anew for each rank
def test_its_command_runs(tmp_path: Path) -> None:
    launcher = ("--standalone", "--nproc-per-node", 2, EXAMPLE)
    done = spardl(*launcher, module="torch.distributed.run", cwd=tmp_path, env=environment(OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
