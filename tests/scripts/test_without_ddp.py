"""The same scripts without DDP: local updates, and gradients that are synchronised when the optimizer steps.

Promised: at density 1 each of them ends with the weights of plain DDP. Momentum and weight decay are each rank's own
then, or act before the selection; their mean is what DDP has.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from processes import on_processes
from scripts.test_everyday import Checkpointed, Tied, momentum_sgd
from scripts.twice import Attach, assert_close, attach_with, plain
from training import all_equal, batch, loss_of, mlp, weights_of

Wrap = Callable[[nn.Module], Any]
WAYS: dict[str, dict[str, Any]] = {"local updates": {"update": "local"}, "at the step": {"when": "step"}}


def steps(optimizers: list[Optimizer], loss_at: Callable[[int], Tensor], each: Callable[[], object] = int) -> None:
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_at(step).backward()
        for optimizer in optimizers:
            optimizer.step()
        each()


def averages_of_weights(wrap: Wrap, attach: Attach) -> Tensor:
    model = wrap(mlp())
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    steps([optimizer], lambda step: loss_of(model, dist.get_rank(), step), lambda: average.update_parameters(model))
    return torch.cat([weights_of(model), weights_of(average)])


def one_cycle(wrap: Wrap, attach: Attach) -> Tensor:
    """It changes momentum as well."""
    model = wrap(mlp())
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)
    schedule = OneCycleLR(optimizer, max_lr=0.3, total_steps=9)
    steps([optimizer], lambda step: loss_of(model, dist.get_rank(), step), schedule.step)
    return weights_of(model)


def activation_checkpoints(wrap: Wrap, attach: Attach) -> Tensor:
    model = wrap(Checkpointed(reentrant=False))
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)
    steps([optimizer], lambda step: loss_of(model, dist.get_rank(), step))
    return weights_of(model)


def tied_weights(wrap: Wrap, attach: Attach) -> Tensor:
    model = wrap(Tied())
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)

    def loss_at(step: int) -> Tensor:
        words = torch.randint(0, 30, (9, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        return cross_entropy(model(words[:-1]).flatten(0, 1), words[1:].flatten())

    steps([optimizer], loss_at)
    return weights_of(model)


def compiled(wrap: Wrap, attach: Attach) -> Tensor:
    """This backend runs what was captured as it is."""
    model = torch.compile(wrap(mlp()), backend="eager")
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)
    steps([optimizer], lambda step: loss_of(model, dist.get_rank(), step))
    return weights_of(model)


def two_models(wrap: Wrap, attach: Attach) -> Tensor:
    """A generator and a discriminator that step in turn. What the generator's pass leaves in the other is thrown away,
    which needs no care here: nothing is synchronised before a step. (DDP averages it, and nobody looks.)"""
    torch.manual_seed(0)
    generator, judge = wrap(nn.Linear(6, 20)), wrap(nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizers = momentum_sgd(generator, lr=0.05), momentum_sgd(judge, lr=0.05)
    for model, optimizer in zip((generator, judge), optimizers, strict=True):
        attach(model, optimizer=optimizer)
    for step in range(6):
        real, _ = batch(dist.get_rank(), step)
        made = generator(real[:, :6])
        optimizers[1].zero_grad()
        scores = torch.cat([judge(real), judge(made.detach())])
        binary_cross_entropy_with_logits(scores[:, 0], torch.cat([torch.ones(8), torch.zeros(8)])).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        binary_cross_entropy_with_logits(judge(made)[:, 0], torch.ones(8)).backward()
        optimizers[0].step()
    return torch.cat([weights_of(generator), weights_of(judge)])


SCRIPTS = (averages_of_weights, one_cycle, activation_checkpoints, tied_weights, compiled, two_models)


def _all(rank: int, workers: int) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Every script by plain DDP, and by each way without it."""
    return {
        script.__name__: (
            script(DistributedDataParallel, plain),
            {way: script(lambda model: model, attach_with(density=1.0, **given)) for way, given in WAYS.items()},
        )
        for script in SCRIPTS
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    return on_processes(2, _all)


@pytest.mark.xdist_group("without ddp")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [script.__name__ for script in SCRIPTS])
def test_a_script_trains_like_plain_ddp(ranks: list[Any], name: str, way: str) -> None:
    for rank, found in enumerate(ranks):
        theirs, ours = found[name]
        assert_close(ours[way], theirs, f"rank {rank}, {name}, {way}")
    assert all_equal(found[name][1][way] for found in ranks)


def two_optimizers(wrap: Wrap, attach: Attach) -> Tensor:
    model = wrap(mlp())
    parameters = list(model.parameters())
    optimizers: list[Optimizer] = [SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.05, momentum=0.9)]
    attach(model, optimizer=optimizers)
    steps(optimizers, lambda step: loss_of(model, dist.get_rank(), step))
    return weights_of(model)


def _two_optimizers(rank: int, workers: int) -> tuple[Tensor, Tensor]:
    ours = two_optimizers(lambda model: model, attach_with(density=1.0, update="local"))
    return two_optimizers(DistributedDataParallel, plain), ours


@pytest.mark.xdist_group("without ddp")
def test_two_optimizers_of_one_model_step_it_as_they_would_with_ddp() -> None:
    """With local updates; a step is over when both have stepped."""
    for rank, (theirs, ours) in enumerate(on_processes(2, _two_optimizers)):
        assert_close(ours, theirs, f"rank {rank}")
