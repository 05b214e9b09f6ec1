"""The transport of torch.distributed keeps to NCCL's rules, for every method."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nccl_rules
import programs
from far import far, near
from nccl_rules import Refused, installed
from spardl.collectives.methods.registry import METHODS
from spardl.collectives.program import AllReduce, Message, Round
from spardl.config import SyncConfig
from spardl.errors import PeerError
from spardl.transport.inquiry import Verdict
from threads import on_threads

WORKERS = [3, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (2, 4, 5))]


def on_ranks(make, workers, function):
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda rank: function(make(rank)), range(workers)))


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("workers", WORKERS)
def test_every_method_keeps_to_the_rules_and_gives_the_same_bits(monkeypatch, workers, method):
    config = SyncConfig(method=method, density=0.02, dense_below=0)
    monkeypatch.setattr(programs, "STEPS", 2)
    expected = on_threads(workers, lambda transport: programs.synchronized(transport, config))
    plain = programs.gradient
    monkeypatch.setattr(programs, "gradient", lambda rank, step: far(plain(rank, step)))
    with installed(monkeypatch, workers) as make:
        found = on_ranks(make, workers, lambda transport: programs.synchronized(transport, config))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(near(a), b) for a, b in zip(one["results"], other["results"], strict=True))
        assert torch.equal(near(one["residual"]), other["residual"])


def frame(size):
    return far(torch.ones(size, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (Round([Message(1, frame(4), 4)], [], "x"), Round([], [(0, 5)], "x"), "4 bytes, rank 1 expects 5"),
        (AllReduce(far(torch.ones(3))), AllReduce(far(torch.ones(4))), "different collectives"),
        (AllReduce(torch.ones(3)), AllReduce(torch.ones(3)), "memory of the host"),
    ],
)
def test_what_nccl_would_refuse_is_refused(monkeypatch, first, second, why):
    """The fake group is worth something: broken programs fail on it."""
    with installed(monkeypatch, 2) as make, pytest.raises(Refused, match=why):
        on_ranks(make, 2, lambda transport: transport.perform((first, second)[transport.rank]))


def test_a_rank_with_nothing_to_send_or_receive_goes_on(monkeypatch):
    with installed(monkeypatch, 2) as make:
        assert on_ranks(make, 2, lambda transport: transport.perform(Round([], [], "nothing"))) == [[], []]


class _Endless:
    """Work that nobody ends."""

    def wait(self):
        return True

    def is_completed(self):
        return False


def test_work_that_does_not_end_in_time_is_a_lost_peer(monkeypatch):
    """Nothing waits for it in the round; the deadline holds where somebody wants to see results."""
    monkeypatch.setattr(nccl_rules, "PATIENCE", 0.05)

    def lose(transport):
        monkeypatch.setattr(transport, "_inquire", lambda peers: Verdict(dict.fromkeys(peers, "is gone")))
        transport._queue(_Endless(), [1 - transport.rank], "a round")
        with pytest.raises(PeerError, match="sent or took nothing") as caught:
            transport.arrive()
        return caught.value.peer

    with installed(monkeypatch, 2) as make:
        assert on_ranks(make, 2, lose) == [1, 0]


def test_frames_of_the_host_are_brought_to_the_device_and_filled_up(monkeypatch):
    given = torch.arange(3, dtype=torch.uint8).numpy()

    def exchange(transport):
        peer = 1 - transport.rank
        (arrived,) = transport.perform(Round([Message(peer, given, 5)], [(peer, 5)], "numbers"))
        return near(arrived).tolist()

    with installed(monkeypatch, 2) as make:
        assert on_ranks(make, 2, exchange) == [[0, 1, 2, 0, 0]] * 2
