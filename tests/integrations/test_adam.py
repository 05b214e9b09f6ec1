"""Adam before the selection: what it computes, what it keeps, and what it is good for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

import spardl
from processes import on_processes
from training import EXACT, all_equal, loss_of, mlp, train, weights_of


def beside_torch(rank: int, workers: int) -> dict[str, Tensor]:
    """By how much weights differ from torch's after some steps, without a first moment, which torch divides as well."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 0.1}
    found = {}
    for name, kind in (("decoupled", AdamW), ("coupled", Adam)):
        theirs, ours = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
        train(theirs, kind(theirs.parameters(), **settings), range(5))
        optimizer = spardl.LocalAdam(ours.parameters(), decoupled=name == "decoupled", **settings)
        spardl.attach(ours, optimizer=optimizer, density=1.0)
        train(ours, optimizer, range(5))
        found[name] = (weights_of(ours) - weights_of(theirs)).abs().max()
        found[f"{name} moved"] = (weights_of(ours) - weights_of(mlp())).abs().max()
    return found


def test_one_worker_that_sends_all_does_what_adam_does() -> None:
    """With decay through the gradient, as Adam has it, and beside it, as AdamW has it."""
    (found,) = on_processes(1, beside_torch)
    for name in ("decoupled", "coupled"):
        assert found[name] < 1e-5 < 1e-2 < found[f"{name} moved"]


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def moments(rank: int, workers: int) -> dict[str, Any]:
    model = DistributedDataParallel(mlp())
    optimizer = spardl.LocalAdam(model.parameters(), lr=0.01)
    optimizer.bind(model, lambda _: False)

    def divided(step: int) -> Tensor:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        return gradients(model)

    first, skipped = divided(0), divided(0)
    assert not optimizer.state, "a moment was kept before the step"
    optimizer.step()
    counts = {int(state["step"]) for state in optimizer.state.values()}
    second = divided(0)

    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, rank, 1).backward()
        whole = gradients(model)
    plain = torch.autograd.grad(loss_of(model.module, rank, 1), list(model.parameters()))
    return {
        "first": first,
        "skipped": skipped,
        "second": second,
        "counts": counts,
        "untouched": torch.equal(whole, torch.cat([each.flatten() for each in plain])),
    }


def test_moments_count_steps_that_were_taken() -> None:
    """A backward without a step leaves no trace, and micro-batches before the last one are left alone."""
    (found,) = on_processes(1, moments)
    assert torch.equal(found["first"], found["skipped"])
    assert not torch.equal(found["first"], found["second"])
    assert found["counts"] == {1}
    assert found["untouched"]


def noisy(rank: int, workers: int) -> float:
    """How long a first step is, of a weight whose gradient has another sign on each worker but is as large."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = spardl.LocalAdam(model.parameters(), lr=1.0)
    optimizer.bind(model, lambda _: False)
    before = weights_of(model)
    model(torch.tensor([[1.0 if rank else 3.0]])).sum().backward()
    optimizer.step()
    return float((weights_of(model) - before).abs())


def test_the_root_is_that_of_the_mean_over_workers() -> None:
    """Four workers that agree move a weight twice as far as Adam would: it is noise that moves it as far."""
    assert on_processes(4, noisy) == pytest.approx([2.0] * 4, rel=1e-4)


class Uneven(nn.Module):
    """How far its weights are from 1, of which the first counts ten thousand times as much as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(400))
        self.register_buffer("scales", torch.logspace(0, -4, 400))

    def forward(self, goals: Tensor) -> Tensor:
        loss: Tensor = (self.scales * (self.weight - goals).square()).sum()
        return loss


def distance(rank: int, workers: int, local: bool) -> tuple[float, Tensor]:
    """How far the weights are from 1 after 200 steps at 2 %, in the mean; it was 1 where they began."""
    model = DistributedDataParallel(Uneven())
    if local:
        optimizer: torch.optim.Optimizer = spardl.LocalAdam(model.parameters(), lr=0.02)
    else:
        optimizer = Adam(model.parameters(), lr=0.02)
    spardl.attach(model, optimizer=optimizer if local else False, density=0.02, **EXACT)
    source = torch.Generator().manual_seed(rank)
    for _ in range(200):
        optimizer.zero_grad()
        model(1 + 0.1 * torch.randn(400, generator=source)).backward()
        optimizer.step()
    return float((weights_of(model) - 1).abs().mean()), weights_of(model)


def test_small_gradients_get_their_turn() -> None:
    """Adam levels gradients out; behind the selection it is too late for those that were never sent."""
    before, behind = (on_processes(2, distance, local) for local in (True, False))
    assert before[0][0] < 0.2 < 0.5 < behind[0][0], f"{before[0][0]:.2f} before, {behind[0][0]:.2f} behind"
    assert all_equal(weights for _, weights in before)


def kept(rank: int, workers: int) -> tuple[int, int]:
    """How many entries a first step took, and how many of these then have a velocity."""
    model = DistributedDataParallel(Uneven())
    optimizer = spardl.LocalAdam(model.parameters())
    sync = spardl.attach(model, optimizer=optimizer, density=0.1, **EXACT)
    model(torch.ones(400)).backward()
    state = sync.state_dict()
    taken = state["residuals"]["weight"] == 0
    return int(taken.sum()), int((state["velocities"]["weight"][taken] != 0).sum())


def test_what_is_sent_at_once_keeps_its_velocity() -> None:
    """Unlike under SGD, where it is zeroed."""
    for taken, moving in on_processes(2, kept):
        assert 0 < taken == moving < 100


def refused(rank: int, workers: int) -> str:
    model = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
    spardl.LocalAdam(model.parameters())
    with pytest.raises(spardl.ConfigError) as error:
        model(torch.tensor([1])).sum().backward()
    return str(error.value)


def test_gradients_that_are_sparse_by_themselves_are_refused() -> None:
    assert "sparse=False" in on_processes(1, refused)[0]


def test_parameter_groups_keep_betas_and_eps_of_their_own() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [first], "betas": (0.5, 0.9), "eps": 1e-3}, {"params": [second], "weight_decay": 0.3}]
    optimizer = spardl.LocalAdam(groups, lr=0.1, betas=(0.8, 0.99), weight_decay=0.2)
    told = [(each["betas"], each["eps"], each["momentum"], each["decay"]) for each in optimizer.param_groups]
    assert told == [((0.5, 0.9), 1e-3, 0.5, 0.2), ((0.8, 0.99), 1e-8, 0.8, 0.3)]
