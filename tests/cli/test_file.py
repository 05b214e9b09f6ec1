"""Options in a file are options: the same names, the same checks, and the command line counts more."""

import argparse
from pathlib import Path

import pytest

from spardl.cli import execute
from spardl.cli.commands import parse
from spardl.errors import ConfigError


@pytest.fixture
def options(tmp_path: Path):
    """Write a file, and read the options of a command that names it."""

    def read(text: str, *arguments: str, command: str = "train") -> argparse.Namespace:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return parse([command, "--config", str(path), *arguments])

    return read


EVERYTHING = """
recipe = "vgg16-cifar10"
data-dir = "/data"
workers = 6
teams = 3
batch_size = 32          # either spelling
lr = 1e-2
milestones = [40, 60.5]
nesterov = true
density = 0.001
save-every = "5m"
checkpoint-dir = "ck"
resume = true
"""


def test_a_file_sets_what_options_set(options) -> None:
    """Numbers, texts, lists and switches, under the names that --help shows."""
    found = options(EVERYTHING)
    assert (found.recipe, found.data_dir, found.workers, found.teams) == ("vgg16-cifar10", Path("/data"), 6, 3)
    assert (found.batch_size, found.lr, found.milestones, found.nesterov) == (32, 0.01, (40.0, 60.5), True)
    assert (found.density, found.save_every.seconds, found.resume) == (0.001, 300.0, "latest")


def test_the_command_line_counts_more(options) -> None:
    """What stands in the file is what would be taken otherwise."""
    found = options(EVERYTHING, "--lr", "0.5", "--no-nesterov", "--teams", "auto")
    assert (found.lr, found.nesterov, found.teams, found.batch_size) == (0.5, False, "auto", 32)


def test_methods_may_be_a_list(options) -> None:
    """As people write several things in a file."""
    assert options('methods = ["dense", "spardl"]', command="compare").methods == "dense,spardl"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epoch = 3", "Did you mean epochs?"),
        ('help = "me"', "does not have"),
        ('methods = "dense"', "Did you mean method?"),
        ("batch-size = 3\nbatch_size = 4", "batch-size twice"),
        ('epochs = "3"', "without quotes"),
        ('epochs = "three"', "'three' is not a number of epochs"),
        ("epochs = 1.5", "whole number of epochs"),
        ("epochs = true", "a number or a text"),
        ("epochs = [3]", "one value, not a list"),
        ("recipe = 3", "in quotes"),
        ("nesterov = 1", "true or false"),
        ('milestones = ["soon"]', "not a list of numbers"),
        ("[train]\nepochs = 3", "does not have"),
        ("[epochs]\nnumber = 3", "not in a table"),
        ("epochs = 1979-05-27", "a number or a text"),
        ("epochs: 3", "not a TOML file"),
    ],
)
def test_what_a_file_cannot_say_is_refused(options, text: str, sentence: str) -> None:
    """With the file's name, the key and what it should be."""
    with pytest.raises(ConfigError, match=r"run\.toml") as refusal:
        options(text)
    assert sentence in str(refusal.value)


def test_settings_in_a_file_that_contradict_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the command line: one sentence, exit code 2."""
    path = tmp_path / "run.toml"
    path.write_text('optimizer = "adam"\nnesterov = true\n')
    assert execute(["train", "--config", str(path)]) == 2
    assert "nesterov belongs to the optimizer sgd" in capsys.readouterr().err


def test_a_file_that_is_nested_too_deeply_is_a_sentence(tmp_path, capsys):
    path = tmp_path / "deep.toml"
    path.write_text("a = " + 100_000 * "[" + 100_000 * "]")
    assert execute(["train", "--config", str(path)]) == 2
    assert capsys.readouterr().err == f"spardl: {path} is nested too deeply; options stand by themselves.\n"
