"""What every transport has, whoever moves its bytes. MPI's is held to it in `test_mpi.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from messages import message
from processes import on_processes
from spardl.collectives.program import AllReduce, Round
from spardl.errors import StateError
from spardl.metrics import Traffic
from spardl.transport.base import Transport
from spardl.transport.choice import transport_named
from spardl.transport.delayed import DelayedTransport
from spardl.transport.direct import DirectTransport
from spardl.transport.torchdist import TorchTransport

MAKERS: dict[str, Callable[[], Transport]] = {
    "chosen": lambda: transport_named("auto", None, timeout=30, device="cpu"),
    "direct": lambda: DirectTransport(timeout=30),
    "without a process group": lambda: DirectTransport(timeout=30, alone=True),
    "torch": lambda: TorchTransport(timeout=30),
    "delayed": lambda: DelayedTransport(TorchTransport(timeout=30), 0.0),
}


def held_to_it(rank: int, workers: int) -> list[str]:
    return [name for name, make in MAKERS.items() if check(make(), rank, workers)]


def check(transport: Transport, rank: int, workers: int) -> bool:
    """All members, before and after closing. Whether a round brought what was sent."""
    assert (transport.rank, transport.workers, transport.device) == (rank, workers, torch.device("cpu"))
    assert isinstance(transport.traffic, Traffic)
    assert transport.gather_texts(f"rank {rank}") == [f"rank {each}" for each in range(workers)]
    to, source = (rank + 1) % workers, (rank - 1) % workers
    swap = Round([message(to, np.full(5, rank, np.uint8))], [(source, 9)], "swap")
    (arrived,) = transport.perform(swap)
    total = torch.ones(3)
    assert transport.perform(AllReduce(total)) is None and total.tolist() == [workers] * 3
    transport.close()
    transport.close()
    refused(lambda: transport.perform(swap))
    refused(lambda: transport.perform(AllReduce(total)))
    refused(lambda: transport.gather_texts("late"))
    return bool((torch.as_tensor(arrived)[:5] == source).all())


def refused(action: Callable[[], Any]) -> None:
    with pytest.raises(StateError, match=r"^this transport was closed; make another one\.$"):
        action()


def test_every_transport_has_all_that_the_contract_names() -> None:
    """Also that a transport which was closed says so, instead of waiting for peers that are gone."""
    assert on_processes(3, held_to_it) == [list(MAKERS)] * 3


def one_after_another(rank: int, workers: int) -> list[float]:
    """Of three transports on the same ranks, the second is closed first."""
    made = [TorchTransport(timeout=30) for _ in range(3)]
    made[1].close()
    totals = []
    for transport in (made[0], made[2]):
        tensor = torch.ones(1)
        transport.perform(AllReduce(tensor))
        totals.append(float(tensor))
    return totals


def test_closing_one_transport_leaves_the_others_alone() -> None:
    assert on_processes(2, one_after_another) == [[2.0, 2.0]] * 2
