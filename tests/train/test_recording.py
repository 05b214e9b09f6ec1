"""Gradients that a run records: each worker's own, of the steps asked for, without a trace in the run itself."""

from pathlib import Path

import pytest
import torch

import fakes
from processes import on_processes
from spardl.cli.train import chosen_recording
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.simulator.gradients import load
from spardl.train.loop import train
from spardl.train.recipes import recipe_named
from spardl.train.recording import GradientRecorder

QUICK = recipe_named("digits").changed(epochs=1, batch_size=16, max_steps=3, seed=5)


@pytest.fixture(autouse=True)
def small_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.use(monkeypatch)


def trained(rank, workers, folder):
    reports = []
    for recorder in (None, GradientRecorder(Path(folder) / "some.pt", 2)):
        reports.append(train(QUICK, SyncConfig(density=0.1, dense_below=0), recorder=recorder))
    return [(report.figures, report.train_loss) for report in reports]


def test_recording_changes_nothing_and_keeps_each_workers_own_gradients(tmp_path):
    for plain, recorded in on_processes(2, trained, str(tmp_path)):
        assert plain == recorded
    source = load(tmp_path / "some.pt")
    assert (source.steps, source.workers) == (2, 2)
    first, second = torch.empty(source.elements), torch.empty(source.elements)
    source.fill(0, 0, 0, first)
    source.fill(0, 1, 0, second)
    assert first.abs().sum() > 0 and not torch.equal(first, second)


def test_where_gradients_go_is_checked_before_the_run(tmp_path):
    assert chosen_recording(None) is None
    assert chosen_recording(f"{tmp_path}/a.pt") == (tmp_path / "a.pt", 1)
    assert chosen_recording(f"{tmp_path}/a.pt:4") == (tmp_path / "a.pt", 4)
    for wrong in (f"{tmp_path}/a.pt:0", f"{tmp_path}/a.pt:many", "/no/such/folder/a.pt", str(tmp_path)):
        with pytest.raises(ConfigError):
            chosen_recording(wrong)
