"""Each rank answers at any time whom it waits for, and only to those who know the secret of the run."""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spardl.transport import watch as module
from spardl.transport import words
from spardl.transport.inquiry import inquire
from spardl.transport.watch import Watch, open_watches
from spardl.transport.words import Silence, Standing
from watching import HOST, watches


class Waiting:
    """What a transport is to a watch."""

    def __init__(self, *peers: int) -> None:
        self.peers = peers

    def pending(self, operation: object) -> tuple[int, ...]:
        return self.peers


def test_a_rank_says_whom_it_waits_for_and_since_when() -> None:
    with watches(3) as (first, second, third):
        transport = Waiting(2)
        second.for_whom(transport.pending)
        second.operation, second.since = "a round", time.monotonic() - 5
        answers = first.ask([1, 2])
        assert isinstance(answers[1], Standing) and isinstance(answers[2], Standing)
        assert answers[1].waits_for == (2,) and 5 <= answers[1].seconds < 60
        assert answers[2] == Standing()
        assert third.told() == {}


def test_whoever_leaves_tells_because_of_whom_and_says_so_when_asked() -> None:
    with watches(3) as (first, second, third):
        first.tell(2, [1])
        assert (second.told(), third.told()) == ({0: 2}, {})
        assert third.ask([0]) == {0: Standing(blames=2)}


def test_a_rank_that_was_away_before_and_finds_another_gone_names_itself() -> None:
    """It was stopped between two operations, for longer than others wait; that one has given up on it and left."""
    with watches(3) as (first, second, _):
        first.operation = None
        first._ear.gaps.append((time.monotonic(), 5.0))
        assert list(inquire(first, [1], 3, since=time.monotonic(), timeout=4).faults) == [1]
        second.close()
        assert list(inquire(first, [1], 3, since=time.monotonic(), timeout=6).faults) == [1]
        assert list(inquire(first, [1], 3, since=time.monotonic(), timeout=4).faults) == [0]
        first.operation = None  # another one has gone well since
        assert list(inquire(first, [1], 3, since=time.monotonic(), timeout=4).faults) == [1]


def test_a_watch_that_was_closed_is_gone() -> None:
    with watches(2) as (first, second):
        second.close()
        assert first.ask([1]) == {1: Silence.GONE}
        assert second not in open_watches() and first in open_watches()


def test_a_transport_that_nobody_uses_any_more_ends_its_watch() -> None:
    with watches(2) as made:
        first = made[0]
        made.pop()
        assert first.ask([1]) == {1: Silence.GONE}


def test_a_rank_that_cannot_listen_cannot_be_asked() -> None:
    """203.0.113.9 is reserved for documentation, so nobody can listen there. The run goes on without."""
    with watches(2, "203.0.113.9") as (first, _):
        assert first.ask([1]) == {1: Silence.UNKNOWN}


def test_a_rank_that_could_never_be_reached_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told an address that leads elsewhere, as of a host that takes its own name for the loopback."""
    with socket.create_server((HOST, 0)) as probe:
        nobody = probe.getsockname()
    told = module.gather_values

    def misled(gather: Any, value: Any) -> list[Any]:
        cards = told(gather, value)
        cards[1]["port"] = nobody[1]
        return cards

    monkeypatch.setattr(module, "gather_values", misled)
    with watches(3) as (first, _, third):
        assert first.ask([1, 2]) == {1: Silence.UNKNOWN, 2: Standing()}
        assert third.ask([0, 1]) == {0: Standing(), 1: Silence.UNKNOWN}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(90),
        bytes(200),
        words._QUESTION.pack(b"SPDW", 1, 0, 1, 0, bytes(32)) + bytes(32),
    ],
    ids=["nothing", "http", "zeros", "no proof"],
)
def test_a_stranger_learns_nothing_and_changes_nothing(said: bytes) -> None:
    with watches(2) as (first, second):
        with socket.create_connection(second._places[1] if second._places else (HOST, 0), timeout=10) as line:
            line.sendall(said)
            if said:
                with contextlib.suppress(ConnectionError):
                    assert line.recv(100) == b""
            assert first.ask([1]) == {1: Standing()}, "it still answers members"
        assert second.told() == {}


def test_an_answer_from_a_stranger_is_none() -> None:
    """Whoever has taken a dead rank's port does not know the secret."""
    with watches(2) as (first, _), socket.create_server((HOST, 0)) as impostor, ThreadPoolExecutor(1) as pool:
        first._places[1] = impostor.getsockname()

        def answer() -> None:
            line, _ = impostor.accept()
            with line:
                line.recv(200)
                line.sendall(struct.pack("<I", 2) + b"{}" + bytes(32))

        answered = pool.submit(answer)
        assert first.ask([1]) == {1: Silence.MUTE}
        answered.result()


def test_what_a_member_says_is_believed_only_if_it_can_be() -> None:
    good = b'{"waits_for": [1], "seconds": 2.0, "blames": null}'
    assert words._standing(good, 2) == Standing((1,), 2.0)
    for bad in (b"", b"[]", b"{", good.replace(b"[1]", b"[7]"), good.replace(b"2.0", b'"x"'), b"[" * 100_000):
        assert words._standing(bad, 2) == Standing()


def stopped(rank: int, board: Any, ready: Any) -> None:
    watch = Watch(1)
    watch.open(HOST, lambda text: _swap(board, 1, text))
    ready.set()
    while not watch.told():
        time.sleep(0.01)
    board[1].put(str(watch.told()))
    signal.pause()


def _swap(board: Any, rank: int, text: str) -> list[str]:
    board[rank].put(text)
    other = board[1 - rank].get(timeout=30)
    return [text, other] if rank == 0 else [other, text]


def test_a_process_that_is_stopped_is_mute_and_one_that_was_killed_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was mute is told things as well, which the kernel keeps until it wakes up, and is not waited for."""
    monkeypatch.setattr(module, "TELL_S", 100.0)
    context = multiprocessing.get_context("fork")
    board, ready = [context.Queue(), context.Queue()], context.Event()
    child = context.Process(target=stopped, args=(1, board, ready))
    child.start()
    assert child.pid is not None
    try:
        watch = Watch(0)
        watch.open(HOST, lambda text: _swap(board, 0, text))
        assert ready.wait(30)
        assert watch.ask([1]) == {1: Standing()}
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert watch.ask([1]) == {1: Silence.MUTE}
        watch.tell(1, [1])
        os.kill(child.pid, signal.SIGCONT)
        assert board[1].get(timeout=30) == "{0: 1}"
    finally:
        child.kill()
        child.join()
    assert watch.ask([1]) == {1: Silence.GONE}
    watch.close()


def test_a_process_that_did_not_run_for_long_knows_it() -> None:
    """Its thread woke up much later than it wanted to: here its clock is set back instead of stopping the process."""
    with watches(2) as (first, _):
        now = time.monotonic()
        assert first.away(now - 60) < 5
        first._ear.gaps.append((now, 30.0))
        assert 30 <= first.away(now - 60) < 35
        assert first.away(now + 1) < 5
        verdict = inquire(first, [1], 2, since=now - 60, timeout=10)
        assert list(verdict.faults) == [0] and "did not run for" in verdict.faults[0]
