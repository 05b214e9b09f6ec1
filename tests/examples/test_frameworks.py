"""The examples of frameworks run as they are: they learn, ranks end with one model, and what was stopped goes on.

They run in processes forked from one that has imported the framework already, which takes longer than they do.
"""

import contextlib
import importlib
import io
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from frameworks import as_torchrun
from spardl.extras import is_installed

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLE, HALF, REST = ("--epochs", "4"), ("--epochs", "2"), ("--epochs", "4", "--resume")
STEPS = [("--save-every", "5", "--steps", *rest) for rest in (["10"], ["5"], ["10", "--resume"])]

# What each needs, how it is run (whole, half, the rest), and a loss that guessing does not reach.
SCRIPTS = {
    "lightning_module.py": ("lightning", [WHOLE, HALF, REST], 2.2),
    "accelerate_loop.py": ("accelerate", [WHOLE, HALF, REST], 2.2),
    "hf_trainer.py": ("hf", STEPS, 4.6),
}


def _run(rank: int, workers: int, script: Path, folders: list[Path], runs: list[tuple[str, ...]]) -> tuple[list, list]:
    said, weights = [], []
    warnings.simplefilter("ignore")
    for folder, options in zip(folders, runs, strict=True):
        sys.argv = [str(script), "--folder", str(folder), *options]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            found = runpy.run_path(str(script), run_name="__main__")
        said.append(out.getvalue())
        weights.append(found["weights"].sum().item())
    return said, weights


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_learns_and_goes_on_exactly_where_it_was_stopped(name: str, tmp_path: Path) -> None:
    """Once without a stop; once stopped half way and resumed: the same weights, to the last bit of their sum."""
    _, runs, guess = SCRIPTS[name]
    folders = [tmp_path / "whole", tmp_path / "stopped", tmp_path / "stopped"]
    (said, first), (silent, second) = as_torchrun(2, _run, EXAMPLES / name, folders, runs)
    assert first == second, "ranks end with different models"
    assert first[0] == first[2] != first[1]
    (loss,) = re.findall(r"validation loss (\S+), weights", said[0])
    assert float(loss) < guess
    assert not any("validation loss" in text for text in silent)


@pytest.fixture(autouse=True)
def imported(name: str) -> None:
    """Before processes part."""
    module = SCRIPTS[name][0]
    framework = "transformers" if module == "hf" else module
    if not is_installed(framework):
        pytest.skip(f"needs {framework}: pip install {framework}")
    importlib.import_module(f"spardl.integrations.{module}")
