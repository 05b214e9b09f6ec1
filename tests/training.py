"""A small model, batches that depend on rank and step, and one training step, for tests on several processes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from spardl import SyncHandle
from spardl.integrations.optim.momentum import in_memory_order

# Small groups are to be sparse here, and values exact; tests that want the defaults say so.
EXACT: dict[str, Any] = {"dense_below": 0, "values": "fp32", "timeout": 30}


def mlp(seed: int = 0) -> nn.Sequential:
    """2,225 parameters in six tensors."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and labels; another batch for each rank and step."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 20, generator=source), torch.randint(0, 5, (size,), generator=source)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, labels = batch(rank, step)
    return cross_entropy(model(inputs), labels)


def train(
    model: nn.Module, optimizer: Optimizer, steps: Iterable[int], *, each: Callable[[], object] = lambda: None
) -> None:
    """Train; after each step call `each`."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        each()


def sgd(model: nn.Module, **settings: Any) -> SGD:
    return SGD(model.parameters(), **{"lr": 0.1, **settings})


def weights_of(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def residuals_of(sync: SyncHandle) -> dict[str, Tensor]:
    residuals: dict[str, Tensor] = sync.state_dict()["residuals"]
    return residuals


def lost_in_a_step(model: DistributedDataParallel, sync: SyncHandle, loss: Callable[[nn.Module], Tensor]) -> float:
    """Run backward, and return by how much what all ranks put in differs from what they got out and kept.

    The largest difference over all coordinates, relative to the largest value. Not for local momentum.
    """
    module = model.module
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss(module), list(named.values()), allow_unused=True)
    before = residuals_of(sync)
    model.zero_grad()
    loss(model).backward()
    SGD(named.values(), lr=0.0).step()  # the gradients are used
    after = residuals_of(sync)
    worst = 0.0
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        local = torch.zeros(parameter.numel()) if gradient is None else in_memory_order(gradient)
        put_in = total(local.double() + before[name].double())
        got = torch.zeros(parameter.numel()) if parameter.grad is None else in_memory_order(parameter.grad)
        got_out = dist.get_world_size() * got.double() + total(after[name].double())
        if parameter.numel():
            worst = max(worst, float((put_in - got_out).abs().max()) / max(1e-30, float(put_in.abs().max())))
    return worst


def total(values: Tensor) -> Tensor:
    """The sum over ranks."""
    summed = values.clone()
    dist.all_reduce(summed)
    return summed


def all_equal(values: Iterable[Tensor]) -> bool:
    """Whether all of them are the same, bit for bit."""
    first, *others = values
    return all(torch.equal(first, other) for other in others)
