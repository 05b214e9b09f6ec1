"""Ranks that hold different tensors are told so, with who differs and where it begins."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from spardl.errors import ReplicaError
from spardl.sync.replicas import compare
from threads import ThreadTransport, on_threads
from training import EXACT, mlp, sgd, train


def tensors(rank: int, odd: int | None) -> dict[str, torch.Tensor]:
    found = {"a": torch.arange(5.0), "b": torch.arange(6).view(2, 3), "c": torch.empty(0)}
    if rank == odd:
        found["b"] = found["b"] + torch.tensor([0, 0, 1])
        found["a"] = found["a"].clone()
    return found


def test_equal_tensors_pass() -> None:
    assert (
        on_threads(3, lambda transport: compare(tensors(transport.rank, None), transport.gather_texts, 7)) == [None] * 3
    )


def test_all_ranks_name_the_one_that_differs_and_the_first_tensor() -> None:
    def differ(transport: ThreadTransport) -> tuple[tuple[int, ...], str, str]:
        with pytest.raises(ReplicaError) as caught:
            compare(tensors(transport.rank, 1), transport.gather_texts, 7)
        return caught.value.ranks, caught.value.tensor, str(caught.value)

    for ranks, tensor, text in on_threads(3, differ):
        assert (ranks, tensor) == ((1,), "b")
        assert text.startswith("before step 7 the tensors of rank 1 differ from those of ranks 0, 2, first in 'b'.")


def drifting(rank: int, workers: int, update: str | None) -> tuple[int, tuple[int, ...], str]:
    """A weight changes on rank 2 after step 3; ranks compare every second step."""
    model = mlp()
    wrapped = DistributedDataParallel(model) if update is None else model
    optimizer = sgd(wrapped)
    rule = {} if update is None else {"update": update}
    sync = spardl.attach(wrapped, optimizer=optimizer, density=0.1, paranoid=2, **rule, **EXACT)
    done = 0
    with pytest.raises(ReplicaError) as caught:
        for step in range(8):
            train(wrapped, optimizer, [step])
            done += 1
            if rank == 2 and step == 3:
                with torch.no_grad():
                    (model[2].bias if update is None else sync._replicas["2.bias"].shared)[0] += 1e-3
    return done, caught.value.ranks, caught.value.tensor


@pytest.mark.parametrize("update", [None, "local"])
def test_a_replica_that_drifts_is_found_at_the_next_comparison(update: str | None) -> None:
    for done, ranks, tensor in on_processes(3, drifting, update):
        assert (done, ranks, tensor) == (4, (2,), "2.bias")
