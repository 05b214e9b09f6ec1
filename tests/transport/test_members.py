"""Groups that are configured again and again, with other ranks each time, as torchft's are: torch does not know them.

A stand-in has what theirs have. It numbers its ranks the other way round than the default group, which is beside it and
must not be asked. `tests/examples/test_torchft.py` has torchft itself.
"""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import spardl
from processes import on_processes
from spardl.errors import ConfigError, PeerError
from spardl.transport.choice import transport_named
from spardl.transport.meeting import Meeting
from spardl.transport.members import Members
from spardl.transport.torchdist import TorchTransport


class Configured(dist.ProcessGroup):
    """What it is at the moment is another group, that torch's registry has never seen."""

    def __init__(self):
        super().__init__(0, 1)
        self._now = None

    def configure(self, store, rank, workers):
        now = dist.ProcessGroup(store, rank, workers)
        now._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        now._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, workers)
        )
        self._now = now

    @property
    def parent(self):
        assert self._now is not None
        return self._now

    def size(self):
        return self.parent.size()


def configured(group, number, rank, workers):
    """The group as its quorum of this number has it: `rank` of `workers`."""
    store = dist.distributed_c10d._get_default_store()
    group.configure(dist.PrefixStore(f"quorum/{number}", store), rank, workers)
    return group


def numbered_by_the_group(rank, workers, transport):
    group = configured(Configured(), 1, workers - 1 - rank, workers)
    made = transport_named(transport, group, timeout=30, device="cpu")
    return made.rank, made.gather_texts(str(rank))


@pytest.mark.parametrize("transport", ["torch", "auto"])
def test_ranks_are_those_of_the_group_and_not_of_the_default_one(transport):
    said = ["2", "1", "0"]
    assert on_processes(3, numbered_by_the_group, transport) == [(2, said), (1, said), (0, said)]


def averaged(rank, workers):
    group = configured(Configured(), 1, workers - 1 - rank, workers)
    found = [spardl.all_reduce(torch.full((4,), float(rank)), group=group, density=1.0, timeout=30)]
    if rank < 2:
        configured(group, 2, 1 - rank, workers - 1)
        found.append(spardl.all_reduce(torch.full((4,), float(rank)), group=group, density=1.0, timeout=30))
    return [float(each[0]) for each in found]


def test_all_reduce_averages_over_those_that_the_group_has_now():
    """Over ranks 0, 1 and 2, then over 0 and 1."""
    assert on_processes(3, averaged) == [[1.0, 0.5], [1.0, 0.5], [1.0]]


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Linear(20, 4)


def train(model, optimizer, rank, steps):
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=source)).square().sum().backward()
        optimizer.step()


def stepped(rank, workers, transport):
    group, model = configured(Configured(), 1, workers - 1 - rank, workers), model_of(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    asked = {"density": 0.1, "dense_below": 0, "transport": transport, "timeout": 30}
    spardl.attach(model, optimizer=optimizer, process_group=group, when="step", **asked)
    train(model, optimizer, rank, steps=4)
    return model.weight.detach().clone()


@pytest.mark.parametrize("transport", ["torch", "auto"])
def test_gradients_are_synchronised_over_it(transport):
    """All ranks hold the same weights, which have moved."""
    first, *others = on_processes(3, stepped, transport)
    assert all(torch.equal(first, each) for each in others) and not torch.equal(first, model_of(2).weight)


def going_on(rank, workers):
    group, model = configured(Configured(), 1, rank, workers), model_of(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    asked = {"update": "local", "on_loss": "continue", "density": 0.1, "dense_below": 0, "timeout": 30}
    sync = spardl.attach(model, optimizer=optimizer, process_group=group, **asked)
    train(model, optimizer, rank, steps=3)
    if rank == 2:
        return None  # and the process ends
    train(model, optimizer, rank, steps=3)
    left = sync.company.workers
    sync.detach()
    configured(group, 2, rank, workers - 1)
    sync = spardl.attach(model, optimizer=optimizer, process_group=group, **asked)
    train(model, optimizer, rank, steps=3)
    sync.flush()
    return left, sync.company.workers, model.weight.detach().clone()


def test_those_that_are_left_go_on_and_attach_to_the_group_of_the_next_quorum():
    """One of three ends; two train on, detach, and attach to what the group is then."""
    first, second, _ = on_processes(3, going_on)
    assert first[:2] == second[:2] == (2, 2)
    assert torch.equal(first[2], second[2])


def test_a_group_that_has_seen_no_quorum_is_refused():
    with pytest.raises(ConfigError, match=r"was not configured yet; wait for its first quorum\.$"):
        TorchTransport(Configured(), timeout=1)


def refused_on_a_device(rank, workers):
    group = configured(Configured(), 1, rank, workers)
    with pytest.raises(ConfigError, match=r'from the CPU\'s memory, not meta; set residuals_on="cpu"\.$'):
        TorchTransport(group, timeout=1, device="meta")


def test_messages_from_a_device_are_refused_with_a_way_out():
    assert on_processes(1, refused_on_a_device) == [None]


def test_a_store_that_is_gone_is_blamed_on_no_rank():
    """A replica group keeps it, and which one is not known here."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    meeting = Meeting(Members([0, 1], 1, client, world=None, known=False), timeout=0.2)
    del server
    error = meeting.silent()
    assert isinstance(error, PeerError) and error.peer is None
    assert str(error).startswith("the replica group that was asked to, which keeps the store at 127.0.0.1:")
