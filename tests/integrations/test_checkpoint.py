"""Checkpoints: a run that stopped and resumed is the run that did not stop, bit for bit."""

import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import spardl
from processes import on_processes
from training import mlp, residuals_of, sgd, train, weights_of

OPTIMIZER = {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}
Checkpoint = dict[str, Any]


class Run:
    """A model, its optimizer, schedule and synchronisation."""

    def __init__(
        self, settings: dict[str, Any], checkpoint: Checkpoint | None = None, order: str = "model attach optimizer sync"
    ) -> None:
        self.model = DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
        self.optimizer = sgd(self.model, **OPTIMIZER)
        self.schedule = OneCycleLR(self.optimizer, max_lr=0.2, total_steps=20, cycle_momentum=True)
        for what in order.split():
            if what == "attach":
                self.sync = spardl.attach(self.model, optimizer=self.optimizer, timeout=30, **settings)
            elif checkpoint is not None:
                {
                    "model": self.model.module.load_state_dict,
                    "optimizer": self.optimizer.load_state_dict,
                    "sync": lambda state: self.sync.load_state_dict(state),
                }[what](checkpoint[what])
        if checkpoint is not None:
            self.schedule.load_state_dict(checkpoint["schedule"])

    def train(self, first: int, last: int) -> None:
        train(self.model, self.optimizer, range(first, last), each=self.schedule.step)

    def save(self) -> Checkpoint:
        """Through a file, as checkpoints go."""
        file = io.BytesIO()
        parts = {"optimizer": self.optimizer, "schedule": self.schedule, "sync": self.sync, "model": self.model.module}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        checkpoint: Checkpoint = torch.load(file, weights_only=True)
        return checkpoint

    def outcome(self) -> list[Tensor]:
        state = self.sync.state_dict()
        return [weights_of(self.model), *state["residuals"].values(), *state["velocities"].values()]


ORDERS = ("model attach optimizer sync", "optimizer attach model sync", "attach sync optimizer model")


def resumed(rank: int, workers: int, settings: dict[str, Any]) -> dict[str, bool]:
    whole = Run(settings)
    whole.train(0, 6)
    checkpoint = whole.save()
    whole.train(6, 12)
    expected = whole.outcome()
    same = {}
    for order in ORDERS:
        again = Run(settings, checkpoint, order)
        again.train(6, 12)
        outcome = again.outcome()
        same[order] = all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))
        same[order] &= str(again.optimizer.state_dict()) == str(whole.optimizer.state_dict())
    controllers = {str(method) for method in checkpoint["sync"]["methods"]}
    same["controllers are saved"] = settings.get("gather") != "b" or "'size': 0" not in str(controllers)
    return same


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (2, {"density": 0.05, "dense_below": 0}),
        (2, {"density": 0.05, "dense_below": 200, "groups": 1000, "residuals": "return", "values": "int8"}),
        (2, {"density": spardl.DensitySchedule(0.05, start=0.5, steps=8, dense_steps=3), "groups": "bucket"}),
        (3, {"density": 0.2, "teams": 3, "gather": "b", "groups": "bucket", "dense_below": 0}),
    ],
    ids=str,
)
def test_resuming_equals_not_having_stopped(workers: int, settings: dict[str, Any]) -> None:
    """Weights, residuals and velocities come out bit for bit, in whatever order things were loaded and attached."""
    for rank, same in enumerate(on_processes(workers, resumed, settings)):
        assert all(same.values()), f"rank {rank}: {same}"


def resumed_early(rank: int, workers: int, settings: dict[str, Any]) -> dict[int, bool]:
    same = {}
    for first in (1, 2, 3):
        whole = Run(settings)
        whole.train(0, first)
        checkpoint = whole.save()
        whole.train(first, 8)
        again = Run(settings, checkpoint)
        again.train(first, 8)
        same[first] = all(torch.equal(a, b) for a, b in zip(again.outcome(), whole.outcome(), strict=True))
    return same


def test_a_run_that_was_saved_before_its_buckets_were_final_goes_on_exactly() -> None:
    """DDP makes its final buckets after the first step, and again in a run that was resumed."""
    for same in on_processes(2, resumed_early, {"density": 0.05, "groups": "bucket", "dense_below": 0}):
        assert same == {1: True, 2: True, 3: True}


def from_plain(rank: int, workers: int) -> dict[str, float]:
    """Resume a checkpoint of plain DDP training with spardl attached before and after the optimizer is loaded."""
    plain = DistributedDataParallel(mlp())
    optimizer = sgd(plain, **OPTIMIZER)
    train(plain, optimizer, range(5))
    weights, state = plain.module.state_dict(), optimizer.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    state = torch.load(_file(state), weights_only=True)
    train(plain, optimizer, range(5, 10))
    found = {}
    for order in ("optimizer attach", "attach optimizer"):
        model = DistributedDataParallel(mlp())
        model.module.load_state_dict(weights)
        again = sgd(model, momentum=0.5, nesterov=True)  # all of which the checkpoint overrules
        for what in order.split():
            if what == "attach":
                spardl.attach(model, optimizer=again, density=1.0)
            else:
                again.load_state_dict(state)
        train(model, again, range(5, 10))
        found[order] = float((weights_of(plain) - weights_of(model)).abs().max())
    return found


def _file(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_momentum_of_a_plain_checkpoint_is_taken_over() -> None:
    """Momentum buffers that were saved without spardl go on as velocities, with the saved settings.

    Whether they are loaded before or after attach makes no difference.
    """
    for found in on_processes(2, from_plain):
        for order, difference in found.items():
            assert difference < 1e-6, f"{order}: {difference}"


def refused(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    other = DistributedDataParallel(nn.Sequential(nn.Linear(20, 41), nn.ReLU(), nn.Linear(41, 5)))
    wrong = spardl.attach(other, optimizer=False).state_dict()
    run = Run({"density": 0.05, "dense_below": 0})
    run.train(0, 3)
    good = run.sync.state_dict()
    without_one = {**good, "residuals": {name: r for name, r in good["residuals"].items() if name != "2.bias"}}
    bad = {
        "another model": wrong,
        "a part missing": without_one,
        "another version": {**good, "version": 7},
        "something else": {},
    }
    for name, state in bad.items():
        before = run.outcome()
        with pytest.raises(spardl.StateError) as caught:
            run.sync.load_state_dict(state)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, run.outcome(), strict=True))
        found[name] = (str(caught.value), unchanged)
    model = DistributedDataParallel(mlp())
    sync = spardl.attach(model, optimizer=False)
    with pytest.raises(spardl.StateError) as caught:
        sync.load_state_dict(good)
    found["momentum"] = (str(caught.value), not any(r.any() for r in residuals_of(sync).values()))
    return found


def test_a_state_that_does_not_fit_is_refused_whole() -> None:
    """The error says which parameter does not fit, and nothing has been changed."""
    (found,) = on_processes(1, refused)
    assert all(unchanged for _, unchanged in found.values())
    texts = {name: text for name, (text, _) in found.items()}
    assert re.search(r"'.*' in this state have \d+ elements, but the model has \d+", texts["another model"])
    assert texts["a part missing"] == "this state has no residual for '2.bias'; load the state of the same model."
    assert "version 7" in texts["another version"]
    assert "version None" in texts["something else"]
    assert "attach with optimizer=" in texts["momentum"]
