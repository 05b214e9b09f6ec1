"""A backward whose gradients nobody steps with.

The usual one is a GAN's: the generator's loss goes through the discriminator, whose gradients the next `zero_grad`
throws away. Plain DDP does not mind. With spardl a delivered gradient is a part of what had been waiting, taken out of
the residuals: thrown away, it is lost to training. Promised: the next backward says so on every rank, and says what to
do, which is to run that pass under `no_sync`; then training is that of plain DDP. Clearing gradients that were stepped
with, by whatever means, and giving up steps that are not finite anyway are no reason to complain.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from processes import on_processes
from scripts.twice import Attach, assert_trains_like_plain_ddp, attach_with, error_of
from training import batch, loss_of, mlp, weights_of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda parameters: Adam(parameters, lr=2e-3, betas=(0.5, 0.999)),
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}


class Gan:
    """The loop of the DCGAN tutorial, with `said`, the last line that it came to."""

    def __init__(self, attach: Attach, make: Callable[[Any], Optimizer], *, through_no_sync: bool) -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 20), nn.Tanh())
        discriminator = nn.Sequential(nn.Linear(20, 60), nn.LeakyReLU(0.2), nn.Linear(60, 1))
        self.netG, self.netD = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
        self.optG, self.optD = make(self.netG.parameters()), make(self.netD.parameters())
        attach(self.netG, optimizer=self.optG)
        attach(self.netD, optimizer=self.optD)
        self.through_no_sync = through_no_sync
        self.said = ""

    def train(self, steps: int) -> Tensor:
        netG, netD = self.netG, self.netD
        source = torch.Generator().manual_seed(dist.get_rank())
        ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
        for step in range(steps):
            netD.zero_grad()
            real, _ = batch(dist.get_rank(), step)
            self.say(step, "D on real ones")
            binary_cross_entropy_with_logits(netD(real), ones).backward()
            fake = netG(torch.randn(8, 10, generator=source))
            self.say(step, "D on fake ones")
            binary_cross_entropy_with_logits(netD(fake.detach()), zeros).backward()
            self.optD.step()

            netG.zero_grad()
            self.say(step, "G through D")
            with netD.no_sync() if self.through_no_sync else nullcontext():
                binary_cross_entropy_with_logits(netD(fake), ones).backward()
            self.optG.step()
        return torch.cat([weights_of(netG), weights_of(netD)])

    def say(self, step: int, what: str) -> None:
        self.said = f"step {step}, {what}"


def gan_under_no_sync(attach: Attach, make: Callable[[Any], Optimizer]) -> Tensor:
    return Gan(attach, make, through_no_sync=True).train(8)


@pytest.mark.parametrize(
    "name",
    [
        "Adam",
        "SGD",
        "SGD with momentum",
    ],
)
def test_a_gan_whose_generator_passes_the_discriminator_under_no_sync_trains_like_plain_ddp(name: str) -> None:
    assert_trains_like_plain_ddp(partial(gan_under_no_sync, make=OPTIMIZERS[name]))


def gan_as_in_the_tutorial(rank: int, workers: int, name: str) -> tuple[str, str, str]:
    gan = Gan(attach_with(density=0.1), OPTIMIZERS[name], through_no_sync=False)
    kind, text = error_of(lambda: gan.train(4))
    return kind, text, gan.said


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_zero_grad_throws_away_are_an_error_on_every_rank(name: str) -> None:
    """It comes out of the first backward through the discriminator after the one that was for nothing; with momentum
    out of that one itself, which adds to gradients that have been stepped with."""
    for kind, text, where in on_processes(2, gan_as_in_the_tutorial, name):
        assert kind == "StateError", f"{kind} {text} at {where}"
        assert where == ("step 0, G through D" if name == "SGD with momentum" else "step 1, D on real ones")
        assert "no_sync" in text


def clear_in_place(attach: Attach, where: str) -> Tensor:
    """Gradients are set to zero and never to None, by the model or by the optimizer, before the step or after it."""
    model = DistributedDataParallel(mlp())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    attach(model, optimizer=optimizer)
    for step in range(8):
        if where == "before":
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        if where == "after":
            model.zero_grad(set_to_none=False)
    return weights_of(model)


@pytest.mark.parametrize("where", ["before", "after"])
def test_clearing_gradients_in_place_is_not_throwing_them_away(where: str) -> None:
    assert_trains_like_plain_ddp(partial(clear_in_place, where=where))


def give_up_bad_steps(attach: Attach, when: str) -> Tensor:
    """Two batches of rank 1 are broken: when any rank's loss is not finite, all give the step up."""
    model = DistributedDataParallel(mlp())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    attach(model, optimizer=optimizer)
    for step in range(10):
        inputs, labels = batch(dist.get_rank(), step)
        if step in (3, 4, 7) and dist.get_rank() == 1:
            inputs[0, 0] = torch.inf
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if when == "after backward":
            loss.backward()
        bad = (~loss.detach().isfinite()).float()
        dist.all_reduce(bad)
        if bad:
            optimizer.zero_grad()
            continue
        if when == "before backward":
            loss.backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_a_guard_against_losses_that_are_not_finite_may_give_up_steps(when: str) -> None:
    """Nothing is taken out of residuals in such a step, so nothing is lost with it."""
    assert_trains_like_plain_ddp(partial(give_up_bad_steps, when=when))
