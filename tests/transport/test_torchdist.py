"""Real processes over gloo give the same bits as the simulated network."""

import os

import pytest
import torch

from clusters import Cluster
from processes import on_processes
from programs import LENGTH, STEPS, gradient, synchronized
from spardl.config import SyncConfig
from spardl.errors import PeerError
from spardl.transport.torchdist import TorchTransport


def over_gloo(rank, workers, config):
    transport = TorchTransport(timeout=60)
    found = synchronized(transport, config)
    return found["results"], found["residual"], found["moved"][0], found["moved"][2]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_gloo_and_the_simulated_network_give_the_same_bits(workers):
    """Results, residuals, rounds and bytes of the same programs are equal on both."""
    choices = {
        2: SyncConfig(density=0.02),
        3: SyncConfig(density=0.02, values="int8", residuals="return"),
        4: SyncConfig(density=0.02, teams=4, values="fp32", indices="raw"),
        6: SyncConfig(density=0.02, teams=3, values="fp16", blocks="contiguous"),
    }
    config = choices[workers]
    cluster = Cluster(workers, LENGTH, config)
    expected = [cluster.step([gradient(rank, step) for rank in range(workers)])[0] for step in range(STEPS)]
    for rank, (results, residual, rounds, sent) in enumerate(on_processes(workers, over_gloo, config)):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, expected, strict=True))
        assert torch.equal(residual, cluster.residuals()[rank])
        assert (rounds, sent) == (cluster.network.traffic[rank].rounds, cluster.network.traffic[rank].bytes_sent)


def texts(rank, workers):
    return TorchTransport(timeout=30).gather_texts("ü" * rank)


def test_texts_of_any_length_are_gathered_in_rank_order():
    assert on_processes(3, texts) == [["", "ü", "üü"]] * 3


def alone(rank, workers):
    if rank == 0:
        with pytest.raises(
            PeerError, match=r"^rank 1 of 2 did not come within 1 s; all ranks of a group must"
        ) as caught:
            TorchTransport(timeout=1)
        assert caught.value.peer == 1


def test_a_rank_that_does_not_come_is_named():
    assert on_processes(2, alone) == [None, None]


def loops_of_gloo():
    """Each device of gloo has a thread that waits for events, and wakes up all the time."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link) == "anon_inode:[eventpoll]" for link in links if os.path.islink(link))


def added_loops(rank, workers):
    before = loops_of_gloo()
    kept = [TorchTransport(timeout=30) for _ in range(3)]
    return before, loops_of_gloo() - before, len(kept)


def test_our_groups_bring_no_thread_that_wakes_up_while_they_are_idle():
    for before, added, _ in on_processes(2, added_loops):
        assert before >= 1 and added == 0
