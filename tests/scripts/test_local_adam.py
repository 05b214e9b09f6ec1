"""`LocalAdam` in the scripts that Adam's users have: with schedules, parameter groups, and loss scaling.

Promised: schedules reach it, also those that cycle momentum, which for Adam is `betas[0]`; groups keep the `betas` and
`eps` of their own; on one worker at density 1 it takes Adam's steps, wherever dividing before the first moment and
after it is the same. Loss scaling is refused: a division by the second moment takes the scale out of a gradient, and
`GradScaler` would then take it out once more.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import spardl
from processes import on_processes
from scripts.twice import error_of
from training import loss_of, mlp, weights_of


class Slope(nn.Module):
    """A loss whose gradient is the same at all weights, so that both orders of division are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50))
        self.register_buffer("slope", torch.linspace(-3.0, 3.0, 50))

    def forward(self) -> Tensor:
        return (self.weight * self.slope).sum()


def one_cycle(model: DistributedDataParallel, optimizer: Optimizer) -> Tensor:
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    for _ in range(200):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        schedule.step()
    return weights_of(model)


def cycled(rank: int, workers: int) -> tuple[Tensor, Tensor]:
    theirs, ours = DistributedDataParallel(Slope()), DistributedDataParallel(Slope())
    optimizer = spardl.LocalAdam(ours.parameters(), weight_decay=0.0)
    spardl.attach(ours, optimizer=optimizer, density=1.0, timeout=30)
    return one_cycle(theirs, AdamW(theirs.parameters(), weight_decay=0.0)), one_cycle(ours, optimizer)


def test_a_schedule_that_cycles_momentum_does_what_it_does_to_adam() -> None:
    """To 2 %: Adam corrects its bias as if the present beta had been that of all steps, and so is a little short."""
    ((theirs, ours),) = on_processes(1, cycled)
    assert theirs.abs().min() > 5.0
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.0)


def with_groups(rank: int, workers: int) -> tuple[Tensor, Tensor]:
    """Without a first moment, so that both orders of division are the same."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
        others = [each for name, each in model.named_parameters() if not name.endswith("bias")]
        own = {"betas": (0.0, 0.9), "eps": 0.1, "weight_decay": 0.0, "lr": 0.05}
        return [{"params": biases, **own}, {"params": others}]

    theirs, ours = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.0, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    adam, local = AdamW(groups(theirs), **settings), spardl.LocalAdam(groups(ours), **settings)
    spardl.attach(ours, optimizer=local, density=1.0, timeout=30)
    for step in range(10):
        for model, optimizer in ((theirs, adam), (ours, local)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return weights_of(theirs), weights_of(ours)


def test_groups_keep_betas_and_eps_of_their_own() -> None:
    ((theirs, ours),) = on_processes(1, with_groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def scaled(rank: int, workers: int, told: bool, enabled: bool) -> tuple[str, str]:
    """The usual loop with a scaler that `attach` may have been told of."""
    model = DistributedDataParallel(mlp())
    optimizer = spardl.LocalAdam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)

    def train() -> None:
        spardl.attach(model, optimizer=optimizer, scaler=scaler if told else None, density=0.1, timeout=30)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()

    return error_of(train)


@pytest.mark.parametrize("told", [True, False])
def test_loss_scaling_is_refused(told: bool) -> None:
    """At attach where it is known there, otherwise in the first step."""
    for kind, text in on_processes(2, scaled, told, True):
        assert kind in ("ConfigError", "StateError")
        assert "GradScaler" in text


@pytest.mark.parametrize("told", [True, False])
def test_a_scaler_that_is_switched_off_is_fine(told: bool) -> None:
    assert on_processes(2, scaled, told, False) == [("", ""), ("", "")]
