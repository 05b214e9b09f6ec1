"""A run that is stopped in any way goes on with `--resume`, and ends with the same parameters, bit for bit."""

import subprocess
from pathlib import Path
from signal import SIGTERM

import pytest

from commands import json_lines, spardl, start
from processes import on_processes
from spardl.config import SyncConfig
from spardl.train.loop import train
from spardl.train.recipes import recipe_named

TRAINING = ("train", "--workers", 2, "--epochs", 4, "--density", 0.02, "--momentum", 0.8)
STEPS_PER_EPOCH = 44


def train_without_a_break(rank, workers):
    return train(recipe_named("digits").changed(epochs=4, momentum=0.8), SyncConfig(density=0.02))


def started(epoch: int, *arguments: object) -> subprocess.Popen[str]:
    """A run, when it has come to the end of an epoch."""
    run = start(*TRAINING, *arguments)
    assert run.stderr is not None
    for line in run.stderr:
        if f"epoch {epoch}/" in line:
            return run
    raise AssertionError("the run ended early")


@pytest.mark.timeout(300)
def test_a_run_that_was_killed_and_then_asked_to_stop_goes_on_exactly(tmp_path: Path) -> None:
    """SIGKILL leaves time for nothing: the last whole checkpoint is enough. At SIGTERM, the launcher passes it on, all
    ranks save and stop at one step, and the exit code says why."""
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    places = ("--checkpoint-dir", folder, "--keep", 2, "--log-dir", log, "--log-every", 1)
    with started(1, *places, "--save-every", 5) as run:
        run.kill()
    killed_at = max(int(each.name.removeprefix("step-")) for each in folder.iterdir() if not each.suffix)
    assert killed_at % 5 == 0 and killed_at > STEPS_PER_EPOCH - 5

    with started(2, *places, "--resume") as run:
        run.send_signal(SIGTERM)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 128 + SIGTERM, err
    stopped_at = max(int(each.name.removeprefix("step-")) for each in folder.iterdir())
    assert [line for line in err.splitlines() if "epoch" not in line] == [
        "spardl: saving, to stop after this step; once more ends it at once.",
        f"spardl: stopped at step {stopped_at} by SIGTERM; go on with --resume.",
    ]

    done = spardl(*TRAINING, *places, "--resume", "--json", tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    assert f"goes on from step {stopped_at}" in done.stderr
    (record,) = json_lines((tmp_path / "run.json").read_text())
    whole = on_processes(2, train_without_a_break)[0]
    assert record["resumed_at"] == stopped_at
    assert record["parameters_sha256"] == whole.parameters_sha256
    assert [epoch["figures"] for epoch in record["epochs"]] == [epoch.figures for epoch in whole.epochs]
    lines = json_lines((log / "log.jsonl").read_text())
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 4 * STEPS_PER_EPOCH + 1))
    assert len(list(folder.iterdir())) == 2


def test_a_new_run_is_not_mixed_with_an_old_one(tmp_path: Path) -> None:
    """A folder that holds checkpoints is not written to without --resume."""
    (tmp_path / "step-00000005").mkdir()
    refused = spardl(*TRAINING, "--checkpoint-dir", tmp_path)
    assert refused.returncode == 2
    assert "holds checkpoints of an earlier run, the last one at step 5" in refused.stderr
