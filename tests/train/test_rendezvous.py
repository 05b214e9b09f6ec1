"""Ranks meet within a deadline, or each one that came names those that did not."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from spardl.errors import ConfigError
from spardl.train.place import Place
from spardl.train.rendezvous import process_group


def meet(place: Place) -> str:
    """Try to meet for a second; return what went wrong."""
    with pytest.raises(ConfigError) as refusal, process_group(place, timeout=1):
        pytest.fail("the ranks met")
    return str(refusal.value)


def places(workers: int, *ranks: int) -> list[Place]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return [Place(rank=rank, workers=workers, host="127.0.0.1", port=port) for rank in ranks]


def test_all_ranks_that_came_name_those_that_did_not() -> None:
    """Ranks 0 and 2 of 5 hear the same: 1, 3 and 4 are missing."""
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(meet, places(5, 0, 2)))
    assert all(answer.startswith("ranks 1, 3, 4 of 5 never came") for answer in answers), answers


def test_a_rank_that_is_claimed_twice_is_refused() -> None:
    """Two processes with the same RANK would wait for a third one that never comes."""
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(meet, places(3, 0, 1, 1)))
    assert any("two processes claim rank 1" in answer for answer in answers), answers
    assert any("rank 2 of 3 never came" in answer for answer in answers), answers


def test_a_port_that_is_taken_is_a_sentence() -> None:
    """Rank 0 cannot listen where somebody else does."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in meet(Place(rank=0, workers=2, host="127.0.0.1", port=port))


def test_one_rank_meets_itself() -> None:
    """Inside there is a process group; afterwards there is none."""
    (place,) = places(1, 0)
    with process_group(place, timeout=10):
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    assert not dist.is_initialized()
