"""Front ends on a device that is not the CPU: local updates and gradients at the step, over NCCL's rules.

Optimizers step parameters of the device; what a backward would bring is put into `.grad` by hand.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from far import FAR, WAITS, divides_alike, far, loading, near
from nccl_rules import installed
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.integrations import at_step as at_step_module
from spardl.integrations.at_step import StepSync
from spardl.integrations.local import LocalSync
from spardl.sync import session
from spardl.sync.plan import Member
from spardl.sync.session import Session
from spardl.update import LocalUpdates
from threads import Board, ThreadTransport

WORKERS, STEPS, MORE = 2, 3, 2
SHAPES = {"first": (30, 20), "second": (40,), "third": (25, 8)}


class Model(nn.Module):
    def __init__(self, place):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(place(torch.randn(shape, generator=generator))))
        self.register_buffer("mean", place(torch.zeros(5)))

    def backward(self, rank, step, place):
        """Gradients that depend on weights, as real ones do."""
        for number, parameter in enumerate(self.parameters()):
            source = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
            parameter.grad = 0.1 * parameter.detach() + place(torch.randn(parameter.shape, generator=source))


@contextmanager
def ranks_on(monkeypatch):
    """`start(visit)` calls `visit(rank)` on a thread per rank, whose sessions are connected: on the device by NCCL's
    rules, on the CPU by mailboxes."""
    here = threading.local()

    def start(visit):
        def run(rank):
            here.rank = rank
            return visit(rank)

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(run, range(WORKERS)))

    board = Board(WORKERS)
    with installed(monkeypatch, WORKERS) as make:

        def connect(*_, device, **__):
            return make(here.rank) if torch.device(device) == FAR else ThreadTransport(board, here.rank)

        monkeypatch.setattr(session, "transport_named", connect)
        yield start


def optimizer_of(kind, model):
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        divides_alike(optimizer)  # what torch does by itself on a device is not what is compared
        return optimizer
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def train(sync, model, optimizer, rank, steps, place):
    for step in steps:
        model.backward(rank, step, place)
        optimizer.step()
    return [near(each.detach()).clone() for each in model.parameters()]


def local(rule, values="bf16"):
    """What makes a model, its optimizer and local updates of it."""

    def make(place):
        model = Model(place)
        optimizer = optimizer_of("adamw", model)
        config = SyncConfig(density=0.05, dense_below=0, timeout=100, values=values)
        return LocalSync(model, [optimizer], config, rule), model, optimizer

    return make


def at_step(**settings):
    def make(place):
        model = Model(place)
        optimizer = optimizer_of("sgd", model)
        config = SyncConfig(**{"density": 0.05, "dense_below": 0, "timeout": 100, **settings})
        return StepSync(model, optimizer, config), model, optimizer

    return make


FRONT_ENDS = {
    "local": local(LocalUpdates()),
    "late": local(LocalUpdates(delay=1)),
    "outer momentum": local(LocalUpdates(every=2, outer="nesterov", outer_momentum=0.5)),
    "reset": local(LocalUpdates(apply="reset")),
    "gradients": at_step(),
    "clipped": at_step(clip_norm=0.5),
    "on the host": at_step(residuals_on="cpu"),
    "diagnosed": at_step(diagnose_every=2, values="int8"),
    "groups": at_step(method="exdyna", groups=3),
}


def copied(state, copy):
    """The same state, with copies of its tensors."""
    if isinstance(state, torch.Tensor):
        return copy(state)
    if isinstance(state, dict):
        return {name: copied(each, copy) for name, each in state.items()}
    return [copied(each, copy) for each in state] if isinstance(state, list) else state


def on_host(state):
    """A state as it comes from a file that was loaded for the CPU."""
    return copied(state, lambda tensor: near(tensor).clone())


# How a state gets from one to the other; where nothing is said, by a file that is loaded for the CPU.
CARRIERS = {
    "late": lambda sync: copied(sync.state_dict(), torch.clone),  # it stays on the device
    "groups": lambda sync: copied(sync.state_dict(), torch.clone),
    "outer momentum": lambda sync: sync.gathered_state_dict(),
    "clipped": lambda sync: sync.gathered_state_dict(),
}


def visits(make, place, carry):
    """Some steps; a state; more steps, and the same again by somebody who goes on from the state."""

    def visit(rank):
        sync, model, optimizer = make(place)
        train(sync, model, optimizer, rank, range(STEPS), place)
        state = carry(sync)
        shown = on_host(model.state_dict())
        moments = on_host(optimizer.state_dict())
        went_on = train(sync, model, optimizer, rank, range(STEPS, STEPS + MORE), place)
        again, other, its = make(place)
        with torch.no_grad():
            for name, each in other.state_dict().items():
                each.copy_(shown[name], non_blocking=True)
        with loading():
            its.load_state_dict(moments)
            again.load_state_dict(state)
        return went_on, train(again, other, its, rank, range(STEPS, STEPS + MORE), place)

    return visit


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_train_alike_on_a_device_and_go_on_from_their_states(monkeypatch, name):
    """The same bits as on the CPU, and after a checkpoint the same as without one."""
    found, carry = [], CARRIERS.get(name, lambda sync: on_host(sync.state_dict()))
    for place in (far, torch.clone):
        with ranks_on(monkeypatch) as start:
            found.append(start(visits(FRONT_ENDS[name], place, carry)))
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        for one, other in zip(*ours, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["local", "late", "groups", "clipped", "in parts"])
def test_the_host_waits_twice_in_a_step_of_a_front_end(monkeypatch, name):
    """Once for the step; and once to leave out gradients that are not finite, to count, in all groups together, for the
    norms that are clipped, or for the other parts of a model. The model has three parameters."""
    if name == "in parts":
        monkeypatch.setattr(at_step_module, "mesh_of", lambda *_: "those with the other parts")

    def visit(rank):
        sync, model, optimizer = FRONT_ENDS.get(name, at_step())(far)
        train(sync, model, optimizer, rank, range(1), far)
        sync.session.wait()
        gate.wait()
        WAITS.clear()
        gate.wait()
        train(sync, model, optimizer, rank, range(1, 3), far)
        sync.session.wait()
        beside = sync.session.worker.aside._stream
        return beside.seen[beside]

    gate = threading.Barrier(WORKERS)
    with ranks_on(monkeypatch) as start:
        assert all(start(visit)), "nothing was queued in a stream beside the caller's"
    assert WAITS.total() == 2 * WORKERS * 2


def test_a_tensor_is_reduced_by_itself_on_a_device(monkeypatch):
    """As by `all_reduce`: the same bits as on the CPU, and one wait for each."""

    def visit(place, device, rank):
        one = Session.open([Member("x", 500)], SyncConfig(density=0.05, dense_below=0), device=device, commit="group")
        tensors = [place(torch.randn(500, generator=torch.Generator().manual_seed(10 * rank + i))) for i in range(2)]
        gate.wait()
        WAITS.clear()
        gate.wait()
        for each in tensors:
            assert one.reduce("x", each)
        return [near(each) for each in tensors]

    gate, found = threading.Barrier(WORKERS), []
    for place, device in ((torch.clone, "cpu"), (far, FAR)):
        with ranks_on(monkeypatch) as start:
            found.append(start(partial(visit, place, device)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert WAITS.total() == 2 * WORKERS


def test_residuals_on_the_host_are_about_gradients(monkeypatch):
    model = Model(far)
    with pytest.raises(ConfigError, match="residuals_on"):
        LocalSync(model, [optimizer_of("adamw", model)], SyncConfig(residuals_on="cpu"), LocalUpdates())


def test_residuals_on_the_host_are_there(monkeypatch):
    def visit(rank):
        sync, model, optimizer = FRONT_ENDS["on the host"](far)
        train(sync, model, optimizer, rank, range(2), far)
        return [group.buffer.values.device for group in sync.session.sync.groups], model.first.device

    with ranks_on(monkeypatch) as start:
        for residuals, weights in start(visit):
            assert residuals == [torch.device("cpu")] and weights == FAR
