"""What goes wrong while ranks work ends with one sentence and an exit code that says whose turn it is."""

from pathlib import Path

import pytest

from commands import spardl


def test_a_data_set_that_is_missing_is_one_sentence_and_exit_code_two(tmp_path: Path) -> None:
    """Every rank looks for the files; the user reads once what is missing."""
    done = spardl("train", "--workers", 2, "--recipe", "vgg16-cifar10", "--data-dir", tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("spardl: data set cifar10 needs") and str(tmp_path) in line


@pytest.mark.slow  # train/test_checkpoint.py has the sentence
def test_a_checkpoint_that_is_damaged_is_one_sentence_and_exit_code_two(tmp_path: Path) -> None:
    """It was named, so no other one will do."""
    folder = tmp_path / "step-00000005"
    folder.mkdir()
    done = spardl("train", "--workers", 2, "--resume", folder)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"spardl: the checkpoint {folder} has no meta.json, so it is not whole."


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_and_exit_code_one(tmp_path: Path) -> None:
    """The settings were right: a file that came into the way later is what went wrong."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-00000003.partial").write_text("not a folder")
    done = spardl(
        *("train", "--workers", 1, "--max-steps", 3, "--checkpoint-dir", folder),
        *("--save-every", 3, "--eval-every", 0),
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("spardl: the checkpoint") and "could not be written" in done.stderr
