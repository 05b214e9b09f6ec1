"""Commands on a core install: without rich all of them print plain text; what else is missing is said beforehand."""

import os
from pathlib import Path

import pytest

from commands import environment, spardl
from spardl.cli.columns import in_columns
from spardl.cli.commands import COMMANDS

# Python runs this at its start, also in the ranks that a command starts.
BLOCKER = """
import os
import sys

for name in os.environ["BLOCKED"].split(","):
    sys.modules[name] = None
"""

SMALL = ("--workers", 2, "--recipe", "digits", "--max-steps", 3)

# Each command, and what must stand in its answer.
COMMAND_LINES: dict[str, tuple[tuple[object, ...], str]] = {
    "train": (("train", *SMALL), "training loss"),
    "compare": (("compare", *SMALL, "--methods", "dense,spardl"), "spardl"),
    "recipes": (("recipes",), "vgg16-cifar10"),
    "data": (("data",), "fashion-mnist"),
    "bench": (("bench", "--workers", 2, "--elements", 1000, "--repetitions", 2), "against dense"),
    "plan": (("plan",), "mgwfbp"),
    "simulate": (("simulate", "--elements", 1000), "nothing lost"),
    "methods": (("methods",), "Zhao et al."),
    "doctor": (("doctor", "--workers", 2, "--seconds", 0.1), "All "),
}


@pytest.fixture
def without(tmp_path: Path):
    """An environment in which some modules cannot be imported."""
    folder = tmp_path / "blocker"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)

    def make(*modules: str) -> dict[str, str]:
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return environment(PYTHONPATH=path, BLOCKED=",".join(modules))

    return make


# Those that start ranks and train print through the same functions.
LONG = ("train", "compare", "doctor", "plan", "bench")


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in COMMANDS]
)
def test_every_command_prints_plain_text_without_rich(without, command: str) -> None:
    """A title, columns under a line of dashes, and nothing that only a terminal understands."""
    arguments, found = COMMAND_LINES[command]
    done = spardl(*arguments, env=without("rich"))
    assert done.returncode == 0, done.stderr
    assert found in done.stdout
    assert done.stdout.isascii()
    assert any(line and set(line) == {"-"} for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--plot", "run.png"),
        ("compare", "--pictures", "pictures"),
        ("compare", "--page", "page.html"),
        ("bench", "--picture", "bench.png"),
        ("plan", "--picture", "plan.png"),
        ("plan", "--recipe", "digits", "--picture", "plan.png"),
    ],
    ids=" ".join,
)
def test_without_matplotlib_nothing_begins_that_could_not_be_drawn(without, arguments: tuple[str, ...]) -> None:
    """One sentence, and no rank has started."""
    done = spardl(*arguments, env=without("matplotlib"))
    assert done.returncode == 2
    sentence = "pictures are drawn by matplotlib, which is not installed; install it with: pip install matplotlib"
    assert (done.stdout, done.stderr) == ("", f"spardl: {sentence}\n")


@pytest.mark.parametrize("command", ["train", "compare", "plan"])
def test_without_scikit_learn_no_rank_starts_to_train_on_the_digits(without, command: str) -> None:
    """One sentence, from the launcher itself: a rank would have had to import torch."""
    done = spardl(command, "--recipe", "digits", env=without("sklearn", "torch"))
    assert done.returncode == 2
    sentence = "the digits come with scikit-learn, which is not installed; install it with: pip install scikit-learn"
    assert (done.stdout, done.stderr) == ("", f"spardl: {sentence}\n")


@pytest.mark.slow  # trains
def test_without_tensorboard_the_log_is_lines_and_that_is_said_first(without, tmp_path: Path) -> None:
    """Before the first epoch."""
    done = spardl("train", *SMALL, "--log-dir", tmp_path / "log", env=without("tensorboard"))
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("spardl: TensorBoard is not installed") and "pip install tensorboard" in first
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["log.jsonl"]


def test_plain_columns_are_aligned_and_fold_what_is_too_wide() -> None:
    """Names on the left, figures on the right, no line longer than there is room."""
    rows = [("dense", "all of it", "9"), ("spardl", "only the entries that matter most", "100")]
    lines = list(in_columns(("method", "sends", "ms"), rows, width=30, right=(False, False, True)))
    assert lines == [
        "method  sends               ms",
        "------------------------------",
        "dense   all of it            9",
        "spardl  only the entries   100",
        "        that matter most",
    ]
