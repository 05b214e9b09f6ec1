"""Local momentum: the optimizer's momentum and decay work before the selection, and look as if they had not moved."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import spardl
from processes import on_processes
from training import EXACT, all_equal, loss_of, mlp, residuals_of, sgd, total, train, weights_of

Build = Callable[[torch.nn.Module], SGD]


def two_groups(model: torch.nn.Module) -> SGD:
    """Biases without decay, and with another momentum."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": biases, "momentum": 0.5}, {"params": others, "weight_decay": 0.02, "nesterov": True}]
    return SGD(groups, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Build] = {
    "momentum": lambda m: sgd(m, momentum=0.9),
    "weight decay alone": lambda m: sgd(m, weight_decay=0.05),
    "nesterov": lambda m: sgd(m, momentum=0.9, weight_decay=0.01, nesterov=True),
    "dampening": lambda m: sgd(m, momentum=0.9, dampening=0.3),
    "maximize": lambda m: sgd(m, lr=0.001, momentum=0.9, weight_decay=0.05, maximize=True),
    "several groups": two_groups,
}


def compare(rank: int, workers: int) -> dict[str, dict[str, float]]:
    """The largest difference in weights from plain SGD, for each optimizer and each way to be dense.

    `midway` attaches after 7 of 20 steps and leaves after 14.
    """
    found: dict[str, dict[str, float]] = {}
    for name, build in OPTIMIZERS.items():
        plain = DistributedDataParallel(mlp())
        train(plain, build(plain), range(20))
        found[name] = {}
        for way in ("dense", "density 1", "midway"):
            model = DistributedDataParallel(mlp())
            optimizer = build(model)
            settings = {"method": "dense"} if way == "dense" else {"density": 1.0, "groups": 1000}
            train(model, optimizer, range(7 if way == "midway" else 0))
            sync = spardl.attach(model, optimizer=optimizer, timeout=30, **settings)
            train(model, optimizer, range(7, 14) if way == "midway" else range(20))
            if way == "midway":
                sync.detach()
                train(model, optimizer, range(14, 20))
            found[name][way] = float((weights_of(plain) - weights_of(model)).abs().max())
    return found


def test_dense_groups_train_like_plain_sgd() -> None:
    """With everything sent, 20 steps end where plain SGD ends; so do runs that attach and leave on the way."""
    for found in on_processes(2, compare):
        for name, ways in found.items():
            for way, difference in ways.items():
                assert difference < 2e-6, f"{name}, {way}: {difference}"


def scheduled(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attach_first in (None, True, False):
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
        settings = {"optimizer": optimizer, "density": 1.0}
        if attach_first is True:
            spardl.attach(model, **settings)
        schedule = OneCycleLR(optimizer, max_lr=0.2, total_steps=20, cycle_momentum=True)
        if attach_first is False:
            spardl.attach(model, **settings)
        momenta: list[float] = []
        train(
            model,
            optimizer,
            range(20 - 1),
            each=lambda s=schedule, o=optimizer, m=momenta: (s.step(), m.append(shown(o))),
        )
        found[str(attach_first)] = (weights_of(model), momenta)
    return found


def shown(optimizer: SGD) -> float:
    momentum: float = optimizer.state_dict()["param_groups"][0]["momentum"]
    return momentum


def test_schedulers_that_cycle_momentum_reach_the_local_one() -> None:
    """OneCycleLR sets momentum every step; made before or after attach, training is that of plain SGD."""
    for found in on_processes(2, scheduled):
        plain, momenta = found["None"]
        assert len(set(momenta)) > 5
        for when in ("True", "False"):
            weights, seen = found[when]
            assert torch.allclose(plain, weights, atol=2e-6)
            assert seen == momenta


def changed_by_hand(rank: int, workers: int) -> dict[str, Any]:
    weights = []
    for attached in (False, True):
        model = DistributedDataParallel(mlp())
        first, second, third = (list(model.module[index].parameters()) for index in (0, 2, 4))
        groups = [{"params": first, "momentum": 0.9, "weight_decay": 0.1}, {"params": second, "dampening": 0.5}]
        optimizer = SGD(groups, lr=0.1)
        if attached:
            spardl.attach(model, optimizer=optimizer, density=1.0)
        train(model, optimizer, range(4))
        optimizer.param_groups[0].update(momentum=0, weight_decay=0.0)
        optimizer.param_groups[1].update(momentum=0.7)
        optimizer.add_param_group({"params": third, "momentum": 0.8})
        train(model, optimizer, range(4, 8))
        weights.append((weights_of(model), optimizer.state_dict()["param_groups"]))
    return {"plain": weights[0], "attached": weights[1]}


def test_settings_changed_by_hand_take_effect() -> None:
    """Settings lowered to zero or raised from it, and a parameter group added later, do what they do without spardl."""
    for found in on_processes(2, changed_by_hand):
        assert torch.allclose(found["plain"][0], found["attached"][0], atol=1e-6)
        assert found["plain"][1] == found["attached"][1]


def changed_too_late(rank: int, workers: int) -> tuple[float, bool, float]:
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model, momentum=0.9)
    spardl.attach(model, optimizer=optimizer, density=1.0)
    loss_of(model, rank, 0).backward()
    before = weights_of(model)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    optimizer.param_groups[0].update(momentum=0.5, weight_decay=1.0)
    optimizer.step()
    difference = float((weights_of(model) - (before - 0.1 * gradient)).abs().max())
    return difference, any("momentum_buffer" in state for state in optimizer.state.values()), shown(optimizer)


def test_the_optimizer_never_applies_momentum_on_top() -> None:
    """What is set between backward and step waits for the next gradient: this one has had its momentum already."""
    ((difference, has_buffers, momentum),) = on_processes(1, changed_too_late)
    assert difference < 1e-7
    assert not has_buffers
    assert momentum == 0.5


def looked_at(rank: int, workers: int) -> dict[str, Any]:
    model = DistributedDataParallel(mlp())
    optimizer = two_groups(model)
    untouched = optimizer.state_dict()["param_groups"]
    schedule = CosineAnnealingLR(optimizer, 10)
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, **EXACT)
    train(model, optimizer, range(3), each=schedule.step)
    inside = [dict(group) for group in optimizer.param_groups]
    shown = optimizer.state_dict()["param_groups"]
    velocities = sync.state_dict()["velocities"]
    sync.detach()
    after = optimizer.state_dict()
    return {
        "untouched": untouched,
        "inside": [(group["momentum"], group["weight_decay"]) for group in inside],
        "shown": shown,
        "after": after,
        "means": {name: total(velocity) / workers for name, velocity in velocities.items()},
        "order": [name for name, _ in model.module.named_parameters() if name.endswith("bias")]
        + [name for name, _ in model.module.named_parameters() if not name.endswith("bias")],
        "sizes": {name: p.shape for name, p in model.module.named_parameters()},
        "config": sync.config.density,
    }


def test_settings_are_moved_shown_and_restored() -> None:
    """While attached the optimizer applies neither, and shows both; detach gives settings and mean velocity back."""
    without_lr = ("momentum", "weight_decay", "nesterov", "dampening")
    for found in on_processes(2, looked_at):
        assert found["inside"] == [(0, 0), (0, 0)]
        for kind in ("shown", "after"):
            groups = found[kind]["param_groups"] if kind == "after" else found[kind]
            for group, original in zip(groups, found["untouched"], strict=True):
                assert {key: group[key] for key in without_lr} == {key: original[key] for key in without_lr}
        for index, name in enumerate(found["order"]):
            buffer = found["after"]["state"][index]["momentum_buffer"]
            assert torch.allclose(buffer.flatten(), found["means"][name], atol=1e-7)
            assert buffer.shape == found["sizes"][name]
        assert found["config"] == 1.0


def velocity_and_mass(rank: int, workers: int) -> dict[str, Any]:
    """One sparse step with momentum on a known gradient; then detach and look for what was waiting."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model, lr=0.1, momentum=0.9)
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, **EXACT)
    module = mlp()
    loss_of(module, rank, 0).backward()
    gradient = {name: p.grad.flatten() for name, p in module.named_parameters()}
    loss_of(model, rank, 0).backward()
    state = sync.state_dict()
    taken = {name: state["velocities"][name] == 0 for name in gradient}
    kept = all(torch.equal(state["velocities"][name][~taken[name]], gradient[name][~taken[name]]) for name in gradient)
    own = sum(int((taken[name] & (gradient[name] != 0)).sum()) for name in gradient)
    optimizer.step()
    waiting = {name: total(residual) / workers for name, residual in residuals_of(sync).items()}
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    sync.detach()
    moved = {name: (p.detach() - before[name]).flatten() for name, p in model.module.named_parameters()}
    return {
        "velocity kept where not taken": kept,
        "taken": own,
        "applied": max(float((moved[name] + 0.1 * waiting[name]).abs().max()) for name in moved),
        "waiting": sum(float(each.abs().sum()) for each in waiting.values()),
        "left": sum(float(each.abs().sum()) for each in residuals_of(sync).values()),
        "weights": weights_of(model),
    }


def test_velocity_ends_where_entries_were_taken_and_detach_applies_what_waits() -> None:
    """Taken entries lose their velocity, all others keep it; on leaving, waiting updates are applied exactly once."""
    ranks = on_processes(2, velocity_and_mass)
    for found in ranks:
        assert found["velocity kept where not taken"]
        assert 0 < found["taken"] < 0.11 * 2225
        assert found["waiting"] > 0
        assert found["applied"] < 1e-6
        assert found["left"] == 0
    assert all_equal(found["weights"] for found in ranks)


def without_momentum(rank: int, workers: int) -> dict[str, Any]:
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, **EXACT)
    train(model, optimizer, range(3))
    waiting = {name: total(residual) / workers for name, residual in residuals_of(sync).items()}
    sync.detach()
    optimizer.zero_grad()
    plain = mlp()
    plain.load_state_dict(model.module.state_dict())
    loss_of(plain, rank, 3).backward()
    loss_of(model, rank, 3).backward()
    pairs = [
        (n, p.grad.flatten(), total(q.grad.flatten()) / workers)
        for (n, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True)
    ]
    return {
        "difference": max(float((got - mean - waiting[name]).abs().max()) for name, got, mean in pairs),
        "left": sum(float(each.abs().sum()) for each in residuals_of(sync).values()),
    }


def test_without_momentum_the_step_after_detach_sends_what_waits() -> None:
    """Residuals that are gradients join the next, dense, gradient in full, and nothing is left."""
    for found in on_processes(2, without_momentum):
        assert found["difference"] < 1e-6
        assert found["left"] == 0


def warned(rank: int, workers: int) -> dict[str, list[str]]:
    found = {}
    for case, settings in {
        "momentum": {},
        "plain": {},
        "false": {"optimizer": False},
        "dense": {"method": "dense"},
        "density 1": {"density": 1.0},
    }.items():
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model, momentum=0.0 if case == "plain" else 0.9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spardl.attach(model, **settings)
            train(model, optimizer, range(3))
        found[case] = [str(w.message) for w in caught if w.category is spardl.SparDLWarning]
    return found


def test_an_optimizer_that_attach_was_not_given_is_noticed_if_it_has_something_to_lose() -> None:
    """At its first step, once, with the way out; not without momentum, nor after False, nor where nothing waits."""
    (found,) = on_processes(1, warned)
    (warning,) = found.pop("momentum")
    assert warning.startswith("SGD steps this model, and attach was not given it")
    assert "optimizer=False" in warning
    assert found == {"plain": [], "false": [], "dense": [], "density 1": []}


def unsuitable(rank: int, workers: int) -> dict[str, Any]:
    found = {}
    embedding = torch.nn.Embedding(5, 20, sparse=True)
    model = DistributedDataParallel(torch.nn.Sequential(embedding, mlp()))
    optimizers = {
        "mixed": sgd(model, momentum=0.9),
        "another": sgd(mlp(), momentum=0.9),
    }
    for name, optimizer in optimizers.items():
        with pytest.raises(spardl.ConfigError) as caught:
            spardl.attach(model, optimizer=optimizer)
        found[name] = (str(caught.value), optimizer.param_groups[0]["momentum"])
    apart = SGD([{"params": model.module[1].parameters()}, {"params": [embedding.weight]}], lr=0.1, momentum=0.9)
    spardl.attach(model, optimizer=apart)
    found["apart"] = [group["momentum"] for group in apart.param_groups]
    return found


def test_momentum_is_moved_only_where_nothing_else_depends_on_it() -> None:
    """A group that also holds a sparse embedding is refused and left as it was; a group of its own keeps its own."""
    (found,) = on_processes(1, unsuitable)
    assert found["mixed"][0].startswith("parameter group 0 of the optimizer has momentum or weight decay and holds 1")
    assert found["another"][0].startswith("this optimizer steps no parameter of the model")
    assert found["mixed"][1] == found["another"][1] == 0.9
    assert found["apart"] == [0.0, 0.9]
