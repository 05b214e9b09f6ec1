"""Every two ranks are connected, whoever else calls; and if some cannot be, all ranks learn it together."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spardl.transport.direct.mesh import Unreachable, connect_all

HOME = "127.0.0.1"
ELSEWHERE = "203.0.113.9"  # reserved for documentation: nobody has it
PATIENCE = 20.0


class Table:
    """Ranks on threads lay down their texts and take up everybody's. `change` may alter what one of them reads."""

    def __init__(self, workers: int, change: Callable[[int, list[str]], list[str]]) -> None:
        self.texts = [""] * workers
        self.barrier = threading.Barrier(workers)
        self.change = change

    def gather(self, rank: int, text: str) -> list[str]:
        self.texts[rank] = text
        self.barrier.wait(PATIENCE)
        everyone = list(self.texts)
        self.barrier.wait(PATIENCE)
        return self.change(rank, everyone)


def meet(
    workers: int,
    *,
    change: Callable[[int, list[str]], list[str]] = lambda rank, texts: texts,
    address: Callable[[int], str] = lambda rank: HOME,
    timeout: float = PATIENCE,
) -> list[Any]:
    """What connect_all gave or raised on each rank."""
    table = Table(workers, change)

    def one(rank: int) -> Any:
        try:
            return connect_all(rank, address(rank), lambda text: table.gather(rank, text), timeout=timeout)
        except Unreachable as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(workers)))


def check_and_close(found: list[dict[int, socket.socket]]) -> None:
    """Send every rank's number over each of its lines, and see that it arrives at the right end of it."""
    workers = len(found)
    for rank, lines in enumerate(found):
        assert sorted(lines) == [peer for peer in range(workers) if peer != rank]
        for line in lines.values():
            line.send(bytes([rank]))
    for lines in found:
        for peer, line in lines.items():
            line.settimeout(PATIENCE)
            assert line.recv(10) == bytes([peer])
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not line.get_inheritable()
    for lines in found:
        for line in lines.values():
            line.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_two_ranks_are_connected(workers: int) -> None:
    check_and_close(meet(workers))


def port_of(text: str) -> int | None:
    port = json.loads(text).get("port")
    return None if port is None else int(port)


def test_strangers_are_hung_up_on_and_do_no_harm() -> None:
    """Silent ones, talkative ones, and one that knows the words but not the secret, in front of all ranks."""
    hello = struct.pack("<4sII32s", b"SPDL", 1, 2, b"x" * 32)
    words = [b"", b"GET / HTTP/1.0\r\n\r\n" * 10, hello + b"y" * 32, hello[:7], hello.replace(b"SPDL", b"SPDX")]
    strangers: list[socket.socket] = []

    def call(rank: int, texts: list[str]) -> list[str]:
        """The ranks are listening now, and have not called each other yet."""
        port = port_of(texts[rank])
        for say in words if port is not None else []:
            stranger = socket.create_connection((HOME, port), timeout=PATIENCE)
            stranger.sendall(say)
            strangers.append(stranger)
        return texts

    check_and_close(meet(3, change=call))
    assert len(strangers) == 3 * len(words)
    for stranger in strangers:
        heard = b"".join(iter(lambda stranger=stranger: received(stranger), b""))
        assert len(heard) in (0, 64), "at most the answer to a hello, a random number and a proof"
        stranger.close()


def received(line: socket.socket) -> bytes:
    try:
        return line.recv(100)
    except ConnectionResetError:
        return b""


def test_a_crowd_of_silent_strangers_does_not_keep_the_ranks_out() -> None:
    """They were there first: a hundred, more than are let in at once and fewer than any system's listeners queue."""
    crowd: list[socket.socket] = []
    all_there = threading.Event()

    def call(rank: int, texts: list[str]) -> list[str]:
        if rank == 0 and port_of(texts[0]) is not None:
            crowd.extend(socket.create_connection((HOME, port_of(texts[0])), timeout=PATIENCE) for _ in range(100))
            all_there.set()
        assert all_there.wait(PATIENCE)
        return texts

    check_and_close(meet(2, change=call))
    for stranger in crowd:
        stranger.close()


def reasons(found: list[Any]) -> str:
    """What all ranks raised; it is the same for all."""
    assert all(isinstance(each, Unreachable) for each in found), found
    assert len({(str(each), each.peer) for each in found}) == 1
    return str(found[0])


def test_a_rank_that_cannot_listen_is_named_by_all() -> None:
    found = meet(3, address=lambda rank: ELSEWHERE if rank == 1 else HOME)
    assert reasons(found) == f"rank 1 cannot listen at {ELSEWHERE} (Cannot assign requested address)."
    assert found[0].peer == 1


def changed(card: str, **facts: Any) -> str:
    return json.dumps({**json.loads(card), **facts})


def test_a_refused_connection_is_named_by_all() -> None:
    """Rank 2 is told a port of rank 0 on which nobody listens."""
    with socket.socket() as probe:
        probe.bind((HOME, 0))
        closed = probe.getsockname()[1]

        def mislead(rank: int, texts: list[str]) -> list[str]:
            first = port_of(texts[0]) is not None
            return [changed(texts[0], port=closed), *texts[1:]] if rank == 2 and first else texts

        found = meet(3, change=mislead, timeout=2)
    text = reasons(found)
    assert text.startswith(f"rank 2 cannot connect to rank 0 at {HOME}:{closed} (Connection refused)")
    assert found[1].peer == 0


def test_ranks_with_different_secrets_do_not_connect() -> None:
    def mislead(rank: int, texts: list[str]) -> list[str]:
        first = port_of(texts[0]) is not None
        return [changed(texts[0], secret="00" * 32), *texts[1:]] if rank == 1 and first else texts

    text = reasons(meet(2, change=mislead, timeout=6))
    assert "rank 1 cannot connect to rank 0" in text
    assert "it does not know the secret" in text


def test_a_rank_that_never_answers_is_named_when_patience_ends() -> None:
    """Rank 1 calls a line that is open but at which nobody picks up."""
    with socket.create_server((HOME, 0)) as deaf:

        def mislead(rank: int, texts: list[str]) -> list[str]:
            first = port_of(texts[0]) is not None
            return [changed(texts[0], port=deaf.getsockname()[1]), *texts[1:]] if rank == 1 and first else texts

        text = reasons(meet(2, change=mislead, timeout=1))
    assert "rank 1 cannot connect to rank 0" in text
    assert "(no answer for 0.5 s)" in text


def test_another_version_is_noticed_before_anybody_calls() -> None:
    def mislead(rank: int, texts: list[str]) -> list[str]:
        return [texts[0], changed(texts[1], version=9)]

    assert "rank 1 has version 9" in reasons(meet(2, change=mislead))


def test_ranks_meet_at_addresses_of_the_newer_kind_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    check_and_close(meet(2, address=lambda rank: "::1"))
