"""All-reduce by a ring: what it costs, the yardstick for dense exchanges, and one for transports that have no other.

A reduce-scatter and an all-gather of P-1 steps each, in every one of which each rank sends one P-th of the vector.
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from spardl.collectives.program import Program, Team
from spardl.errors import ProtocolError
from spardl.metrics import Traffic
from spardl.sparse import Array


def ring_steps(workers: int) -> int:
    """Messages of a ring that follow one another: 2(P-1)."""
    return 2 * (workers - 1)


def ring_share(workers: int) -> float:
    """How much of a vector a rank must send so that all have the sum: 2(P-1)/P."""
    return 2 * (workers - 1) / workers


def ring_amount(size: int, workers: int) -> float:
    """What a rank sends of a vector of `size` bytes, or entries. A rank receives as much."""
    return 2 * size * (workers - 1) / workers


def count_ring(traffic: Traffic, size: int, workers: int, seconds: float) -> None:
    """Enter an all-reduce of `size` bytes into the account of one rank."""
    steps, moved = ring_steps(workers), round(ring_amount(size, workers))
    traffic.count(rounds=steps, messages=steps, sent=moved, received=moved, seconds=seconds)


def sum_by_ring(team: Team, tensor: Tensor, name: str) -> Program[None]:
    """Sum a tensor of the CPU over the team in place; all members hold the same bits. 2(m - 1) rounds."""
    flat = tensor.detach().contiguous().view(-1)
    edges = [flat.numel() * i // team.size for i in range(team.size + 1)]
    pieces = [flat[first:last] for first, last in itertools.pairwise(edges)]
    for turn in range(ring_steps(team.size)):
        leaving = pieces[(team.position - turn) % team.size]
        arriving = pieces[(team.position - turn - 1) % team.size]
        frame = leaving.view(torch.uint8).numpy()
        (received,) = yield team.exchange(
            frame, to=1, source=-1, send_capacity=frame.size, receive_capacity=arriving.nbytes, name=name
        )
        theirs = _values(received, arriving, team.member(-1))
        if turn < team.size - 1:
            arriving += theirs
        else:
            arriving.copy_(theirs)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _values(frame: Array, like: Tensor, peer: int) -> Tensor:
    received = frame if isinstance(frame, np.ndarray) else frame.cpu().numpy()
    if received.size != like.nbytes:
        raise ProtocolError(f"rank {peer} sent {received.size} bytes instead of {like.nbytes} of a sum.", peer=peer)
    return (
        torch.from_numpy(received).view(like.dtype) if received.size else like
    )  # nothing has no size to look at it by
