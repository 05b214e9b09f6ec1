"""Sparse COO tensors are summed over ranks, in rank order, with the same bits on every transport."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from processes import on_processes
from spardl.collectives.program import AllReduce, Program
from spardl.errors import ProtocolError
from spardl.metrics import Traffic
from spardl.simulator.driver import Driver
from spardl.simulator.network import Network
from spardl.transport.base import Transport
from spardl.transport.delayed import DelayedTransport
from spardl.transport.direct import DirectTransport
from spardl.transport.sparse_sum import as_bytes, count_sparse, sum_sparse
from spardl.transport.torchdist import TorchTransport

ROWS, WIDTH = 8, 4


def entries(rank: int) -> Tensor:
    """None of rank 0's rows, some of the others', partly the same, and one of them twice."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(ROWS, (2 * rank,), generator=generator)
    rows = torch.cat((rows, rows[:1]))
    values = torch.randn(len(rows), WIDTH, generator=generator)
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, WIDTH), check_invariants=True)


def in_order(workers: int) -> Tensor:
    total = torch.zeros(ROWS, WIDTH)
    for rank in range(workers):
        total += entries(rank).coalesce().to_dense()
    return total


MAKERS: dict[str, Callable[[], Transport]] = {
    "torch": lambda: TorchTransport(timeout=30),
    "direct": lambda: DirectTransport(timeout=30),
    "delayed": lambda: DelayedTransport(TorchTransport(timeout=30), 0.0),
}


def reduced(rank: int, workers: int) -> dict[str, tuple[Tensor, int, int]]:
    found = {}
    for name, make in MAKERS.items():
        transport, tensor = make(), entries(rank)
        transport.perform(AllReduce(tensor))
        found[name] = tensor.to_dense(), transport.traffic.bytes_sent, transport.traffic.bytes_received
    return found


def test_every_transport_sums_sparse_tensors_in_rank_order() -> None:
    """MPI is held to the same in `test_mpi.py`. What was moved is the entries: 8 bytes for a row, and its values."""
    sizes = [entries(rank).coalesce().values().shape[0] * (8 + 4 * WIDTH) for rank in range(4)]
    for rank, found in enumerate(on_processes(4, reduced)):
        for name, (total, sent, received) in found.items():
            assert torch.equal(total, in_order(4)), name
            assert (sent, received) == (3 * sizes[rank], sum(sizes) - sizes[rank]), name


def test_the_simulated_network_sums_sparse_tensors_as_well() -> None:
    tensors = [entries(rank) for rank in range(4)]

    def program(tensor: Tensor) -> Program[None]:
        yield AllReduce(tensor)

    Driver(Network.switch(4)).run([program(tensor) for tensor in tensors])
    assert all(torch.equal(tensor.to_dense(), in_order(4)) for tensor in tensors)


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        pytest.param([ROWS], torch.ones(1, WIDTH), id="a row that does not exist"),
        pytest.param([-1], torch.ones(1, WIDTH), id="a row before the first"),
        pytest.param([2, 2], torch.ones(2, WIDTH), id="a row that comes twice"),
        pytest.param([3, 2], torch.ones(2, WIDTH), id="rows out of order"),
        pytest.param([1, 2], torch.ones(1, WIDTH), id="fewer values than rows"),
        pytest.param([1], torch.ones(1, WIDTH - 1), id="rows that are too short"),
        pytest.param([1], torch.ones(WIDTH)[:1].view(torch.uint8)[:3], id="half a value"),
    ],
)
def test_entries_that_do_not_fit_are_refused_before_they_are_added(rows: list[int], values: Tensor) -> None:
    """They come from the network. The rank that sent them is named, and the tensor stays as it was."""
    ours = torch.sparse_coo_tensor([[0, 5]], torch.ones(2, WIDTH), (ROWS, WIDTH), check_invariants=True).coalesce()
    theirs = iter((as_bytes(torch.tensor(rows)), as_bytes(values)))
    before = ours.to_dense()
    with pytest.raises(ProtocolError, match="rank 1 is wrong"):
        sum_sparse(ours, lambda mine: [mine, next(theirs)], lambda rank: ProtocolError(f"rank {rank} is wrong"))
    assert torch.equal(ours.to_dense(), before)


def test_a_rank_sends_its_entries_to_all_others_and_receives_theirs() -> None:
    traffic = Traffic()
    count_sparse(traffic, [10, 20, 40], 1, 0.5)
    assert (traffic.rounds, traffic.messages, traffic.bytes_sent, traffic.bytes_received) == (2, 4, 40, 50)
