"""Training on several ranks is training; testing on several ranks is exact."""

import torch
from torch import nn

from processes import on_processes
from spardl.config import SyncConfig
from spardl.train.data.digits import digits
from spardl.train.loop import TrainReport, evaluate, train
from spardl.train.models.cnn import digits_cnn
from spardl.train.recipes import recipe_named
from spardl.train.settings import TrainSettings

WORKERS = 3
QUICK = TrainSettings(epochs=1, batch_size=16, lr=0.05, seed=5)


class Unwatched:
    """Counts steps, for want of a person."""

    steps = 0

    def begin(self, method, epochs, steps):
        pass

    def step(self):
        self.steps += 1

    def epoch(self, report):
        pass


def model_with_known_weights() -> nn.Module:
    torch.manual_seed(11)
    return digits_cnn(classes=10)


def evaluate_shard(rank, workers):
    return evaluate(model_with_known_weights(), digits())


def test_accuracy_over_all_ranks_is_that_of_the_whole_test_set() -> None:
    """Sharded evaluation counts every example once, also where the shards differ in length."""
    model, (inputs, labels) = model_with_known_weights(), digits().test.columns
    with torch.no_grad():
        scores = model(inputs)
    accuracy = (scores.argmax(1) == labels).double().mean().item()
    loss = nn.functional.cross_entropy(scores.double(), labels).item()
    for figures in on_processes(WORKERS, evaluate_shard):
        assert figures["accuracy"] == accuracy
        assert abs(figures["loss"] - loss) < 1e-5


def train_quickly(rank, workers, config) -> tuple[TrainReport, int]:
    watcher = Unwatched()
    return train(recipe_named("digits"), QUICK, config, watcher), watcher.steps


def test_every_rank_reports_the_same_training() -> None:
    """Loss and accuracy are of all ranks together; traffic is counted per step."""
    outcomes = on_processes(WORKERS, train_quickly, SyncConfig(density=0.05))
    reports = [report for report, _ in outcomes]
    assert len({(report.accuracy, report.test_loss, report.train_loss) for report in reports}) == 1
    assert [steps for _, steps in outcomes] == [reports[0].steps] * WORKERS
    assert reports[0].steps == 1438 // (WORKERS * 16)
    assert 0 < reports[0].bytes_per_step < 4 * 0.05 * reports[0].parameters * 2


def test_training_twice_gives_the_same_numbers() -> None:
    """Everything that is random hangs on the seed."""
    first, second = (on_processes(2, train_quickly, SyncConfig(density=0.02))[0][0] for _ in range(2))
    assert first.epochs[0].train_loss == second.epochs[0].train_loss
    assert (first.accuracy, first.test_loss, first.bytes_per_step) == (
        second.accuracy,
        second.test_loss,
        second.bytes_per_step,
    )


def test_a_report_is_a_record() -> None:
    """What `--json` writes holds the outcome first, then everything that was set."""
    ((report, _),) = on_processes(1, train_quickly, SyncConfig(method="dense"))
    record = report.to_dict()
    assert record["method"] == "dense" and record["density"] == 1.0
    assert record["accuracy"] == record["epochs"][-1]["accuracy"]
    assert record["settings"]["seed"] == 5
    assert record["config"]["method"] == "dense"
