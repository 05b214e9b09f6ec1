"""A run that is stopped in any way goes on with `--resume`, and ends with the same parameters, bit for bit."""

import math
import subprocess
from pathlib import Path
from signal import SIGTERM

import pytest

from commands import environment, json_lines, spardl, start
from processes import on_processes
from spardl.config import SyncConfig
from spardl.train.loop import train
from spardl.train.recipes import recipe_named
from spardl.train.report import TrainReport

TRAINING = ("train", "--workers", 2, "--density", 0.02, "--momentum", 0.8)
STEPS_PER_EPOCH = 44
ONE_THREAD = environment(OMP_NUM_THREADS=1)  # as the run has that is never stopped: more of them round otherwise


def train_without_a_break(rank, workers, epochs):
    return train(recipe_named("digits").changed(epochs=epochs, momentum=0.8), SyncConfig(density=0.02))


def long_run(seconds: float) -> tuple[int, TrainReport]:
    """How many epochs last this long here, at least four, and the run that they make.

    Ranks agree on a signal a few times per second: a run that is over before they do is not stopped by it.
    """
    epochs = 4
    while True:
        report = on_processes(2, train_without_a_break, epochs)[0]
        if report.seconds >= seconds:
            return epochs, report
        epochs = math.ceil(1.5 * epochs * seconds / report.seconds)


def started(epoch: int, *arguments: object) -> subprocess.Popen[str]:
    """A run, when it has come to the end of an epoch."""
    run = start(*arguments, env=ONE_THREAD)
    assert run.stderr is not None
    for line in run.stderr:
        if f"epoch {epoch}/" in line:
            return run
    raise AssertionError("the run ended early")


@pytest.mark.slow  # a launcher and its ranks are started three times
@pytest.mark.timeout(300)
def test_a_run_that_was_killed_and_then_asked_to_stop_goes_on_exactly(tmp_path: Path) -> None:
    """SIGKILL leaves time for nothing: the last whole checkpoint is enough. At SIGTERM, the launcher passes it on, all
    ranks save and stop at one step, and the exit code says why."""
    epochs, whole = long_run(seconds=1.5)
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    places = ("--checkpoint-dir", folder, "--keep", 2, "--log-dir", log, "--log-every", 1)
    training = (*TRAINING, "--epochs", epochs, *places)
    with started(1, *training, "--save-every", 5) as run:
        run.kill()
    killed_at = max(int(each.name.removeprefix("step-")) for each in folder.iterdir() if not each.suffix)
    assert killed_at % 5 == 0 and killed_at > STEPS_PER_EPOCH - 5

    with started(2, *training, "--resume") as run:
        run.send_signal(SIGTERM)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 128 + SIGTERM, err
    stopped_at = max(int(each.name.removeprefix("step-")) for each in folder.iterdir())
    assert [line for line in err.splitlines() if "epoch" not in line] == [
        "spardl: saving, to stop after this step; once more ends it at once.",
        f"spardl: stopped at step {stopped_at} by SIGTERM; go on with --resume.",
    ]

    done = spardl(*training, "--resume", "--json", tmp_path / "run.json", env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert f"goes on from step {stopped_at}" in done.stderr
    (record,) = json_lines((tmp_path / "run.json").read_text())
    assert record["resumed_at"] == stopped_at
    assert record["parameters_sha256"] == whole.parameters_sha256
    assert [epoch["figures"] for epoch in record["epochs"]] == [epoch.figures for epoch in whole.epochs]
    lines = json_lines((log / "log.jsonl").read_text())
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, epochs * STEPS_PER_EPOCH + 1))
    assert len(list(folder.iterdir())) == 2


def test_a_new_run_is_not_mixed_with_an_old_one(tmp_path: Path) -> None:
    """A folder that holds checkpoints is not written to without --resume."""
    (tmp_path / "step-00000005").mkdir()
    refused = spardl(*TRAINING, "--checkpoint-dir", tmp_path)
    assert refused.returncode == 2
    assert "holds checkpoints of an earlier run, the last one at step 5" in refused.stderr
