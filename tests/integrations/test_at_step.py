"""Gradients that are synchronised when the optimizer steps, on modules that nobody has wrapped."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from training import EXACT, all_equal, loss_of, mlp, sgd, total, weights_of

STEP = {**EXACT, "when": "step"}


def heavy(model):
    return sgd(model, momentum=0.9, weight_decay=0.01, nesterov=True)


def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    return model.to(memory_format=torch.channels_last)


def _image_loss(model, rank, step):
    source = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(4, 3, 8, 8, generator=source)  # contiguous, so that gradients have other strides than weights
    return nn.functional.cross_entropy(model(images), torch.randint(0, 5, (4,), generator=source))


def _as_ddp(rank, workers):
    found = {}
    for name, make, loss in (("mlp", mlp, loss_of), ("channels_last", convolutions, _image_loss)):
        theirs, ours = DistributedDataParallel(make()), make()
        if rank:
            nn.init.zeros_(ours[0].weight)  # only rank 0's weights count
        for model in (theirs, ours):
            optimizer = heavy(model)
            sync = spardl.attach(model, optimizer=optimizer, density=1.0, **STEP) if model is ours else None
            for step in range(6):
                if step == 4 and sync is not None:
                    assert sync.stats().seconds_exposed > 0
                    sync.detach()  # momentum goes back, and it goes on densely
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
        found[name] = weights_of(theirs), weights_of(ours)
    return found


def test_at_density_one_it_trains_like_ddp():
    """Momentum, Nesterov and weight decay included, whatever the order of weights in memory."""
    ranks = on_processes(2, _as_ddp)
    for name in ranks[0]:
        assert all_equal(ours for _, ours in (found[name] for found in ranks))
        for found in ranks:
            theirs, ours = found[name]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-6)


def _sparse(rank, workers):
    model = mlp()
    optimizer = sgd(model, lr=0.0)
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, **STEP)
    given = torch.zeros(2225, dtype=torch.float64)
    got = given.clone()
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        given += torch.cat([each.grad.double().flatten() for each in model.parameters()])
        optimizer.step()
        got += torch.cat([each.grad.double().flatten() for each in model.parameters()])
    residuals = sync.state_dict()["residuals"]
    kept = torch.cat([residuals[name].double() for name, _ in model.named_parameters()])
    return float((total(given) - workers * got - total(kept)).abs().max() / total(given).abs().max())


def test_nothing_is_lost():
    assert all(lost < 1e-6 for lost in on_processes(3, _sparse))


def _scaled(rank, workers):
    """In step 1 rank 0 overflows; whoever clips unscales first."""
    model = mlp()
    optimizer = heavy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    sync = spardl.attach(model, optimizer=optimizer, scaler=scaler, density=0.05, **STEP)
    moved, scales = [], []
    for step in range(4):
        before = weights_of(model)
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (torch.inf if (rank, step) == (0, 1) else 1.0)).backward()
        if step >= 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, weights_of(model)))
        scales.append(scaler.get_scale())
    return moved, scales, weights_of(model), max(float(e.abs().max()) for e in sync.state_dict()["residuals"].values())


def test_a_scaler_skips_a_step_on_all_ranks_and_residuals_are_unscaled():
    ranks = on_processes(2, _scaled)
    assert all_equal(weights for _, _, weights, _ in ranks)
    for moved, scales, _, largest in ranks:
        assert moved == [True, False, True, True] and scales[-1] == 2.0**15
        assert 0 < largest < 10


def _misuse(rank, workers):
    texts = []

    def attempt(step, **settings):
        model = mlp()
        optimizer = sgd(model)
        spardl.attach(model, optimizer=optimizer, density=0.05, **{**STEP, **settings})
        loss_of(model, rank, 0).backward()
        try:
            step(model, optimizer)
            texts.append("went through")
        except spardl.StateError as error:
            texts.append(str(error))

    def with_a_scaler(model, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 1)).backward()
        scaler.step(optimizer)

    def unused(model, optimizer):
        model[4].bias.grad = None
        optimizer.step()

    def never_finite(model, optimizer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(20):
                model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
                for each in model.parameters():
                    each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                optimizer.step()

    attempt(lambda model, optimizer: optimizer.step(lambda: loss_of(model, rank, 1)))
    attempt(with_a_scaler)
    attempt(unused)
    attempt(never_finite)
    attempt(lambda model, optimizer: optimizer.step(None))
    return texts


def test_what_would_go_wrong_is_an_error_that_says_what_to_do():
    """A closure that is None, as Accelerate's optimizer hands on, is none."""
    wanted = [
        "optimizer.step(closure)",
        "Pass scaler=",
        "'4.bias' has no gradient",
        "10 steps in a row",
        "went through",
    ]
    for texts in on_processes(2, _misuse):
        for text, part in zip(texts, wanted, strict=True):
            assert part in text, text


def _warn(rank, workers):
    model = mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spardl.attach(model, optimizer=torch.optim.AdamW(model.parameters()), density=0.05, **STEP)
    return [str(each.message) for each in caught if issubclass(each.category, spardl.SparDLWarning)]


def test_adam_behind_the_selection_is_warned_of():
    for texts in on_processes(2, _warn):
        assert len(texts) == 1 and 'update="local"' in texts[0]


def test_a_module_that_ddp_has_wrapped_is_not_for_it():
    with pytest.raises(spardl.ConfigError, match="wrap it first"):
        spardl.attach(mlp(), density=0.1)
