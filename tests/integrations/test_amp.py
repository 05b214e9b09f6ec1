"""Loss scaling: a step that one rank must skip is skipped by all and leaves no trace, and scales leave no trace."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from training import EXACT, all_equal, batch, loss_of, mlp, sgd, weights_of


class Model(nn.Module):
    """A sparse embedding and a body. Its `armed` parameter gets an infinite gradient in the next backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 20, sparse=True)
        self.body = mlp()
        self.armed = ""
        for name, parameter in self.body.named_parameters():
            parameter.register_hook(lambda gradient, name=name: gradient * (math.inf if name == self.armed else 1))

    def forward(self, inputs: Tensor) -> Tensor:
        words = self.embedding(torch.arange(len(inputs)) % 8)
        if self.armed == "embedding":
            words.register_hook(lambda gradient: gradient * math.inf)
        return self.body(inputs + words)


def snapshot(sync: spardl.SyncHandle) -> dict[str, Any]:
    state = sync.state_dict()
    del state["steps"]
    return state


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second


def skipping(rank: int, workers: int, settings: dict[str, Any]) -> dict[str, Any]:
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.002)
    sparse = torch.optim.SGD([model.module.embedding.weight], lr=0.1)
    optimizer = sgd(model.module.body, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sync = spardl.attach(model, optimizer=optimizer, scaler=scaler, density=0.1, dense_below=40, **settings)
    left_alone, weights, scales = [], [], []
    for step, armed in enumerate(["", "", "4.bias", "2.weight", "embedding", "", ""]):
        model.module.armed = armed if rank == workers - 1 else ""
        before, weights_before = snapshot(sync), weights_of(model)
        for each in (optimizer, sparse):
            each.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        for each in (optimizer, sparse):
            scaler.step(each)
        scaler.update()
        left_alone.append((same(before, snapshot(sync)), torch.equal(weights_before, weights_of(model))))
        weights.append(weights_of(model))
        scales.append(scaler.get_scale())
    total = sync.stats().total
    return {"left alone": left_alone, "weights": weights, "scales": scales, "steps": (total.steps, total.skipped)}


@pytest.mark.parametrize(
    ("workers", "settings"),
    [(2, {"groups": "model"}), (2, {"groups": 1000}), (2, {"groups": "bucket"}), (3, {"teams": 3, "gather": "b"})],
    ids=str,
)
def test_an_infinite_gradient_on_one_rank_skips_the_step_everywhere(workers: int, settings: dict[str, Any]) -> None:
    """Residuals, velocities, controllers and weights stay bit for bit, whichever group was hit; then training goes on.

    The hit parameters lie in a dense group, in a sparse one, and in a sparse embedding beside all groups.
    """
    ranks = on_processes(workers, skipping, settings)
    for found in ranks:
        skipped = (True, True)
        taken = (False, False)
        assert found["left alone"] == [taken, taken, skipped, skipped, skipped, taken, taken]
        assert found["scales"] == [1024, 1024, 512, 256, 128, 128, 128]
        assert found["steps"] == (4, 3)
    for weights in zip(*(found["weights"] for found in ranks), strict=True):
        assert all_equal(weights)
        assert weights[0].isfinite().all()


def scaled(rank: int, workers: int) -> list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """The same training without a scaler, with a disabled one, and with one that doubles its scale every step."""
    outcomes = []
    for scaler in (
        None,
        torch.amp.GradScaler("cpu", enabled=False),
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1),
    ):
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
        sync = spardl.attach(model, optimizer=optimizer, scaler=scaler, density=0.05, clip_norm=0.5, **EXACT)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        state = sync.state_dict()
        outcomes.append((weights_of(model), state["residuals"], state["velocities"]))
    return outcomes


def test_a_changing_scale_changes_no_residual() -> None:
    """Residuals and velocities are kept without the scale: growth by powers of two does not change a bit."""
    for plain, disabled, growing in on_processes(2, scaled):
        for outcome in (disabled, growing):
            assert torch.equal(plain[0], outcome[0])
            assert same(plain[1], outcome[1])
            assert same(plain[2], outcome[2])
        assert any(residual.any() for residual in plain[1].values())


WAYS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "at the step": {"when": "step"},
    "local updates": {"update": "local"},
}


def autocast(rank: int, workers: int, way: str) -> dict[str, tuple[Tensor, float, float, float]]:
    """Two micro-batches per step, clipped; in half precision with a scale that is too large at first."""
    return {str(dtype): mixed(rank, way, dtype) for dtype in (torch.bfloat16, torch.float16)}


def mixed(rank: int, way: str, dtype: torch.dtype) -> tuple[Tensor, float, float, float]:
    model = mlp() if WAYS[way] else DistributedDataParallel(mlp())
    optimizer = sgd(model, lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10, enabled=dtype is torch.float16)
    sync = spardl.attach(model, optimizer=optimizer, scaler=scaler, density=0.1, dense_below=0, **WAYS[way])
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        for part in (0, 1):
            waits = isinstance(model, DistributedDataParallel) and part == 0
            with model.no_sync() if waits else nullcontext(), torch.autocast("cpu", dtype=dtype):
                inputs, labels = batch(rank, part)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                scaler.scale(loss / 2).backward()
            losses.append(float(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    sync.flush()
    return weights_of(model), sum(losses[:2]), sum(losses[-2:]), scaler.get_scale()


@pytest.mark.parametrize("way", WAYS)
def test_autocast_with_scaling_accumulation_and_clipping_learns(way: str) -> None:
    """The usual mixed-precision loops run unchanged, learn, and end with the same weights on all ranks."""
    ranks = on_processes(2, autocast, way)
    for dtype in (torch.bfloat16, torch.float16):
        found = [each[str(dtype)] for each in ranks]
        assert all_equal(weights for weights, *_ in found)
        for _, first, last, scale in found:
            assert last < 0.8 * first
            assert scale == 1.0 if dtype is torch.bfloat16 else scale < 2.0**24
