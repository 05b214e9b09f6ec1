"""Ranks meet within a deadline, or each one that came names those that did not."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spardl.errors import AbsentPeer, ConfigError, PeerError
from spardl.launch import rendezvous
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


def test_a_launchers_store_may_hold_what_an_attempt_that_failed_has_left() -> None:
    """Two attempts on one store: of the first, rank 2 never comes; of the second, which is larger, all meet, each rank
    once, whatever tokens and counts the first one has left."""
    with _launcher() as port, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(meet, hosted(port, 3, 0, 1)))
        assert all(str(answer).startswith("rank 2 of 3 never came") for answer in answers), answers
        stores = list(threads.map(_roll_call, hosted(port, 4, *range(4))))
        assert {store.get("missing") for store in stores} == {b""}
        stores[3].set("told to all", "of this attempt")
        assert {store.get("told to all") for store in stores} == {b"of this attempt"}


def test_under_a_launcher_a_rank_zero_that_never_comes_is_named_though_one_was_there_before() -> None:
    with _launcher() as port, ThreadPoolExecutor(2) as threads:
        list(threads.map(_roll_call, hosted(port, 2, 0, 1)))
        answer = meet(hosted(port, 2, 1)[0])
    assert isinstance(answer, AbsentPeer) and answer.candidates == (0, 1)
    assert str(answer).startswith("rank 0 never came")


def hosted(port: int, workers: int, *ranks: int) -> list[Place]:
    return [Place(rank=rank, workers=workers, host="127.0.0.1", port=port, hosted=True) for rank in ranks]


@contextlib.contextmanager
def _launcher() -> Iterator[int]:
    """A store that a launcher keeps; its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def _roll_call(place: Place) -> Any:
    """Of one rank; the part of the store where it ends. (A process has one group, so threads make none.)"""
    return rendezvous._call_the_roll(rendezvous._store(place, 10), place, 10)


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


def test_ranks_that_met_and_cannot_be_connected_are_told_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose own name leads to loopback, with the others elsewhere."""

    def cannot(*_: Any, **__: Any) -> None:
        raise RuntimeError("[gloo/full_mesh.cc:51] connectFullMesh failed: connection refused. Again")

    monkeypatch.setattr(dist, "init_process_group", cannot)
    with pytest.raises(PeerError, match=r"rank 0 to the others .*GLOO_SOCKET_IFNAME"), process_group(*places(1, 0), 3):
        pytest.fail("the ranks were connected")


def test_a_store_that_answers_is_not_blamed_for_ranks_that_cannot_be_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: done.wait(60))
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.5)
    with pytest.raises(PeerError, match=r"not within 1 s.*GLOO_SOCKET_IFNAME"), process_group(*places(1, 0), 1):
        pytest.fail("the ranks were connected")
    done.set()
