"""Ranks meet within a deadline, or each one that came names those that did not."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from spardl.errors import AbsentPeer, ConfigError
from spardl.launch.place import Place
from spardl.launch.rendezvous import process_group


def meet(place: Place) -> Exception:
    """Try to meet for some seconds; return what went wrong."""
    with pytest.raises((AbsentPeer, ConfigError)) as refusal, process_group(place, timeout=3):
        pytest.fail("the ranks met")
    return refusal.value


def places(workers: int, *ranks: int) -> list[Place]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return [Place(rank=rank, workers=workers, host="127.0.0.1", port=port) for rank in ranks]


def test_all_ranks_that_came_name_those_that_did_not() -> None:
    """Ranks 0 and 2 of 5 hear the same: 1, 3 and 4 are missing."""
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(meet, places(5, 0, 2)))
    assert all(isinstance(answer, AbsentPeer) and answer.peer == 1 for answer in answers), answers
    assert all(str(answer).startswith("ranks 1, 3, 4 of 5 never came") for answer in answers), answers


def test_a_rank_that_is_claimed_twice_is_refused() -> None:
    """Two processes with the same RANK would wait for a third one that never comes."""
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(meet, places(3, 0, 1, 1)))
    texts = {type(answer): str(answer) for answer in answers}
    assert "two processes claim rank 1" in texts[ConfigError]
    assert "rank 2 of 3 never came" in texts[AbsentPeer]


def test_a_port_that_is_taken_is_a_sentence() -> None:
    """Rank 0 cannot listen where somebody else does."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        answer = meet(Place(rank=0, workers=2, host="127.0.0.1", port=port))
    assert isinstance(answer, ConfigError) and f"port {port} is in use" in str(answer)


def test_a_rank_zero_that_never_comes_is_named() -> None:
    """Whoever finds nobody at the address knows whom it waited for."""
    (place,) = places(2, 1)
    answer = meet(place)
    assert isinstance(answer, AbsentPeer) and answer.peer == 0
    assert str(answer).startswith("rank 0 never came")


@pytest.mark.parametrize(("setting", "libuv"), [("0", False), ("1", True)])
def test_the_store_is_the_one_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, setting: str, libuv: bool
) -> None:
    """USE_LIBUV=0 is for builds of torch without libuv, as with torchrun."""
    monkeypatch.setenv("USE_LIBUV", setting)
    (place,) = places(1, 0)
    with process_group(place, timeout=10):
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        assert store.libuvBackend is libuv


def test_one_rank_meets_itself() -> None:
    """Inside there is a process group; afterwards there is none."""
    (place,) = places(1, 0)
    with process_group(place, timeout=10):
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    assert not dist.is_initialized()
