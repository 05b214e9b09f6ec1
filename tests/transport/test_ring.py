"""What a ring all-reduce sends, step by step."""

from typing import Any

import numpy as np
import pytest
import torch

from spardl.collectives.program import Team
from spardl.errors import ProtocolError
from spardl.metrics import Traffic
from spardl.transport.ring import count_ring, ring_amount, ring_share, ring_steps, sum_by_ring


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_each_step_of_a_ring_moves_one_share_of_the_vector(workers: int) -> None:
    """P-1 steps to sum, P-1 to share; alone, a rank sends nothing."""
    assert ring_steps(workers) == 2 * (workers - 1)
    assert ring_amount(1200, workers) == ring_steps(workers) * 1200 / workers
    assert ring_share(workers) == ring_amount(1, workers)


@pytest.mark.parametrize(("workers", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_rank_sends_its_share_twice(workers: int, share: float) -> None:
    """(P-1)/P of the vector to those who sum it, and as much of the sums."""
    assert ring_share(workers) == share


def test_a_ring_is_counted_by_its_steps() -> None:
    traffic = Traffic()
    count_ring(traffic, 1000, 3, 0.25)
    assert (traffic.rounds, traffic.messages, traffic.bytes_sent, traffic.bytes_received) == (4, 4, 1333, 1333)
    assert traffic.seconds == 0.25


def in_lockstep(tensors: list[torch.Tensor]) -> None:
    """All members of a ring, round by round."""
    members = tuple(range(len(tensors)))
    programs = [sum_by_ring(Team(members, rank), tensor, "sum") for rank, tensor in enumerate(tensors)]
    arrived: list[Any] = [None] * len(tensors)
    for _ in range(ring_steps(len(tensors))):
        rounds: list[Any] = [program.send(given) for program, given in zip(programs, arrived, strict=True)]
        sent = {message.peer: np.array(message.frame) for each in rounds for message in each.send}
        arrived = [[sent[rank]] for rank in members]
    for program, given in zip(programs, arrived, strict=True):
        with pytest.raises(StopIteration):
            program.send(given)


@pytest.mark.parametrize("size", [0, 1, 5, 6, 100])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_a_ring_sums_tensors_of_any_size_and_type(size: int, kind: torch.dtype) -> None:
    """Also such as have fewer elements than there are members: then some send nothing."""
    tensors = [torch.arange(size).mul(rank).to(kind) for rank in range(6)]
    in_lockstep(tensors)
    assert all(torch.equal(each.double(), torch.arange(size).mul(15).double()) for each in tensors)


def test_a_ring_sums_tensors_with_gaps_in_their_memory() -> None:
    whole = [torch.full((4, 6), float(rank)) for rank in range(3)]
    in_lockstep([each[:, ::2] for each in whole])
    assert all((each[:, ::2] == 3).all() and (each[:, 1::2] == rank).all() for rank, each in enumerate(whole))


def test_a_member_that_sends_another_size_is_named() -> None:
    program = sum_by_ring(Team((0, 1), 0), torch.zeros(10), "sum")
    next(program)
    with pytest.raises(ProtocolError, match="rank 1 sent 3 bytes instead of 20"):
        program.send([np.zeros(3, np.uint8)])
