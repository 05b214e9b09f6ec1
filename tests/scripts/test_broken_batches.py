"""A batch that is not finite: one broken sample, on one rank.

Plain DDP averages the NaN into every rank's weights, and the run is over. Promised with spardl: the step is given up on
all ranks, with residuals and velocities as they were; with a `GradScaler`, because it sees a gradient that is not
finite and skips; without one, because the step has nothing to apply, and the rank whose gradient it was warns. Where
no step gets through any more, training has diverged, and an error says so.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import spardl
from processes import on_processes
from scripts.twice import error_of, spardl_warnings
from training import batch, mlp, weights_of

OPTIMIZERS: dict[str, Callable[[DistributedDataParallel], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
}


class Training:
    """A loop in which rank 1 has a broken sample in some steps, which may also be left out on all ranks."""

    def __init__(self, optimizer: str = "SGD", scaler: torch.amp.GradScaler | None = None, **settings: Any) -> None:
        self.model = DistributedDataParallel(mlp())
        self.optimizer, self.scaler = OPTIMIZERS[optimizer](self.model), scaler
        spardl.attach(self.model, optimizer=self.optimizer, scaler=scaler, timeout=30, **settings)
        self.done = 0

    def run(self, steps: int, *, broken: range, leave_out: bool = False) -> Tensor:
        for step in range(steps):
            inputs, labels = batch(dist.get_rank(), step)
            if step in broken:
                if leave_out:
                    continue
                if dist.get_rank() == 1:
                    inputs[2, 5] = torch.inf
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(inputs), labels)
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.done += 1
        return weights_of(self.model)


def with_and_without(
    rank: int, workers: int, optimizer: str, scale: float | None, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, list[str]]:
    """The weights of a run with two broken batches, and of one in which they are left out; and what was warned of."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) if scale else None for _ in range(2)]
    with spardl_warnings() as texts:
        ours = Training(optimizer, scalers[0], **settings).run(10, broken=range(3, 5))
    expected = Training(optimizer, scalers[1], **settings).run(10, broken=range(3, 5), leave_out=True)
    return ours, expected, texts


SETTINGS = [{"density": 1.0}, {"density": 0.1}, {"density": 0.1, "groups": 1000}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_broken_samples_cost_their_steps_and_not_the_run(optimizer: str, settings: dict[str, Any]) -> None:
    """It ends as if these batches had not been there, bit for bit, and the rank that had them warns."""
    ranks = on_processes(2, with_and_without, optimizer, None, settings)
    for ours, expected, _ in ranks:
        assert ours.isfinite().all()
        assert torch.equal(ours, expected)
    _, _, texts = ranks[1]
    assert texts
    assert "finite" in texts[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_with_a_scaler_the_steps_are_skipped_without_a_word(settings: dict[str, Any]) -> None:
    """Scalers look for the largest scale by trying, so steps that are not finite belong to their everyday."""
    for ours, expected, texts in on_processes(2, with_and_without, "SGD", 8.0, settings):
        assert torch.equal(ours, expected)
        assert texts == []


def nothing_but_broken_samples(rank: int, workers: int) -> tuple[str, str, int, bool]:
    training = Training(density=0.1)
    with spardl_warnings():
        kind, text = error_of(lambda: training.run(20, broken=range(2, 20)))
    return kind, text, training.done, bool(weights_of(training.model).isfinite().all())


def test_many_broken_steps_in_a_row_are_an_error() -> None:
    """After ten of them, on all ranks; the weights are still those of the last good step."""
    for kind, text, done, finite in on_processes(2, nothing_but_broken_samples):
        assert kind == "StateError"
        assert "finite" in text
        assert 2 + 9 <= done <= 2 + 10
        assert finite
