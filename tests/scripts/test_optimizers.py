"""Optimizers that are not one plain `torch.optim.SGD`.

Frameworks wrap the optimizer, large models shard its state, and many scripts train with AdamW, or with an optimizer for
the body and one for the head. Promised: a wrapped SGD is treated as the SGD inside it; several optimizers can be given
as a list; where momentum or moments cannot be moved before the selection, one warning says for which class and what
that costs; and whatever the optimizer, density 1 trains like plain DDP.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

import spardl
from processes import on_processes
from scripts.twice import Attach, assert_trains_like_plain_ddp, attach_with, error_of, spardl_warnings
from training import all_equal, loss_of, mlp, weights_of


class Prepared(Optimizer):
    """An optimizer as `accelerator.prepare` returns it: an Optimizer by type, which hands all on to `.optimizer`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def momentum_sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def sharded(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)


OTHERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "ZeroRedundancyOptimizer": sharded,
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.005, momentum=0.5),
    "Adagrad": lambda model: Adagrad(model.parameters(), lr=0.05),
}


def train(attach: Attach, make: Callable[[nn.Module], Optimizer], steps: int = 10) -> Tensor:
    model = DistributedDataParallel(mlp())
    optimizer = make(model)
    attach(model, optimizer=optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return weights_of(model)


def test_a_wrapped_optimizer_trains_like_plain_ddp() -> None:
    assert_trains_like_plain_ddp(partial(train, make=lambda model: Prepared(momentum_sgd(model))))


def wrapped_and_bare(rank: int, workers: int) -> tuple[Tensor, Tensor, list[str]]:
    """Sparse, where it matters that momentum has moved."""
    sparse = attach_with(density=0.05)
    with spardl_warnings() as texts:
        wrapped = train(sparse, lambda model: Prepared(momentum_sgd(model)))
    return wrapped, train(sparse, momentum_sgd), texts


def test_momentum_moves_out_of_a_wrapped_sgd_as_out_of_a_bare_one() -> None:
    for wrapped, bare, texts in on_processes(2, wrapped_and_bare):
        assert all_equal([wrapped, bare])
        assert texts == []


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_any_class_trains_like_plain_ddp(name: str) -> None:
    assert_trains_like_plain_ddp(partial(train, make=OTHERS[name]))


def warned_at_attach(rank: int, workers: int, name: str) -> tuple[list[str], list[str]]:
    model = DistributedDataParallel(mlp())
    optimizer = OTHERS[name](model)
    with spardl_warnings() as at_attach:
        spardl.attach(model, optimizer=optimizer, density=0.05, timeout=30)
    with spardl_warnings() as later:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return at_attach, later


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_whose_memory_stays_behind_the_selection_is_warned_of(name: str) -> None:
    """Once, at attach, by the name of its class, with what is lost."""
    for at_attach, later in on_processes(2, warned_at_attach, name):
        assert len(at_attach) == 1
        assert name in at_attach[0]
        assert re.search(r"\b(lags?|los[et]|without)\b", at_attach[0])
        assert later == []


def train_with_two(attach: Attach, given: str = "both", steps: int = 10) -> Tensor:
    """The body has momentum and decay, the head steps faster and with less momentum."""
    model = DistributedDataParallel(mlp())
    body = SGD(model.module[:4].parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)
    head = SGD(model.module[4].parameters(), lr=0.2, momentum=0.5, nesterov=True)
    attach(model, optimizer=[body, head] if given == "both" else body)
    for step in range(steps):
        body.zero_grad()
        head.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        body.step()
        head.step()
    return weights_of(model)


def test_two_optimizers_for_one_model_train_like_plain_ddp() -> None:
    assert_trains_like_plain_ddp(train_with_two, {}, {"groups": 1000})


def test_two_optimizers_of_which_one_is_given_train_like_plain_ddp() -> None:
    """What the other one's parameters receive is their plain gradient."""
    assert_trains_like_plain_ddp(partial(train_with_two, given="one"))


def train_in_two_phases(attach: Attach) -> Tensor:
    """The second phase has an optimizer of its own, while spardl goes on with the momentum of the first."""
    model = DistributedDataParallel(mlp())
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)
    for step in range(10):
        if step == 5:
            optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return weights_of(model)


NOT_GIVEN: dict[str, Callable[[Attach], Tensor]] = {
    "one of two": partial(train_with_two, given="one"),
    "a later one": train_in_two_phases,
}


def warned_of(rank: int, workers: int, name: str) -> list[str]:
    with spardl_warnings() as texts:
        NOT_GIVEN[name](attach_with(density=0.05))
    return texts


@pytest.mark.parametrize("name", NOT_GIVEN)
def test_an_optimizer_with_momentum_that_was_not_given_is_noticed(name: str) -> None:
    """One warning, once it has stepped parameters of the model."""
    for texts in on_processes(2, warned_of, name):
        assert len(texts) == 1
        assert "optimizer" in texts[0]
        assert "momentum" in texts[0]


def wrong_types(rank: int, workers: int) -> list[tuple[str, str]]:
    """What people pass by mistake, most of which prints as a page of text."""
    model = DistributedDataParallel(nn.Sequential(*(mlp() for _ in range(5))))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = {"momentum": [0.9] * 200}
    mistakes = [model, model.state_dict(), [optimizer, model], [optimizer, schedule], [model.parameters()]]
    return [error_of(lambda given=given: spardl.attach(model, optimizer=given, density=0.1)) for given in mistakes]


def test_what_is_no_optimizer_is_refused_in_a_short_sentence() -> None:
    (found,) = on_processes(1, wrong_types)
    for kind, text in found:
        assert kind == "ConfigError"
        assert "optimizer" in text
        assert len(text) < 300, text
