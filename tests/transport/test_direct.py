"""Direct connections give the same bits as the simulated network; what goes wrong is an error with a name in it."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clusters import Cluster
from messages import message
from processes import on_processes
from programs import LENGTH, STEPS, gradient, synchronized
from spardl import kernels
from spardl.collectives.methods.registry import METHODS
from spardl.collectives.program import AllReduce, Message, Round
from spardl.config import SyncConfig
from spardl.errors import ConfigError, SparDLError, SparDLWarning, StateError
from spardl.transport import failures
from spardl.transport.base import Transport
from spardl.transport.choice import best_transport
from spardl.transport.direct import DirectTransport, record
from spardl.transport.direct import transport as direct
from spardl.transport.direct.link import mark_of
from spardl.transport.torchdist import TorchTransport

PROGRAMS = [method for method in METHODS if method != "dense"]  # that one is gloo's own
MEGABYTE = 1 << 20
FOREVER = 1000  # seconds that no test waits for: whoever would wait so long for a dead rank fails it

together = multiprocessing.get_context("fork")


# --- programs ------------------------------------------------------------------------------------------------------


def configs(workers: int) -> list[SyncConfig]:
    odd = SyncConfig(density=0.02, teams=workers, values="fp32", indices="raw", residuals="return")
    return [odd, *(SyncConfig(method=method, density=0.02) for method in PROGRAMS)]


def all_methods(rank: int, workers: int, compiled: bool) -> list[dict[str, Any]]:
    transport = DirectTransport(timeout=60, compiled=compiled)
    found = [synchronized(transport, config) for config in configs(workers)]
    assert transport.traffic.seconds_transferring <= transport.traffic.seconds
    return found


@pytest.mark.parametrize(("workers", "compiled"), [(2, True), (3, True), (5, True), (8, True), (3, False)])
def test_all_methods_give_the_same_bits_as_on_the_simulated_network(workers: int, compiled: bool) -> None:
    """Results, residuals, rounds, messages and bytes of the same programs are equal on both."""
    ranks = on_processes(workers, all_methods, compiled)
    for position, config in enumerate(configs(workers)):
        cluster = Cluster(workers, LENGTH, config)
        expected = [cluster.step([gradient(rank, step) for rank in range(workers)])[0] for step in range(STEPS)]
        for rank in range(workers):
            found, traffic = ranks[rank][position], cluster.network.traffic[rank]
            where = f"{config.method} on rank {rank} of {workers}"
            for mine, theirs in zip(found["results"], expected, strict=True):
                assert torch.equal(mine, theirs), where
            assert torch.equal(found["residual"], cluster.residuals()[rank]), where
            assert found["moved"] == (traffic.rounds, traffic.messages, traffic.bytes_sent), where


# --- messages ------------------------------------------------------------------------------------------------------


def content(sender: int, receiver: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * sender + receiver)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def neighbours(rank: int, workers: int, size: int, name: str = "ring") -> Round:
    to, source = (rank + 1) % workers, (rank - 1) % workers
    return Round([message(to, content(rank, to, size))], [(source, size)], name)


def everybody(rank: int, workers: int, size: int) -> Round:
    peers = [peer for peer in range(workers) if peer != rank]
    return Round(
        [message(peer, content(rank, peer, size)) for peer in peers], [(peer, size) for peer in peers], "everybody"
    )


def check(transport: Transport, operation: Round) -> None:
    """Perform the round; each message is what its sender made of it, all of it."""
    arrived = transport.perform(operation)
    for (peer, size), frame in zip(operation.receive, arrived, strict=True):
        assert np.asarray(frame).dtype == np.uint8 and np.array_equal(frame, content(peer, transport.rank, size))


def all_kinds(rank: int, workers: int, compiled: tuple[bool, ...]) -> tuple[int, int]:
    transport = DirectTransport(timeout=60, compiled=compiled[rank])
    for size in (0, 1, 15, 4096, 8193, 65_536, 65_537, 200_000, 8 * MEGABYTE):
        check(transport, neighbours(rank, workers, size))
        check(transport, everybody(rank, workers, size // 4))
    # Shorter than its room, out of every other byte of a tensor, to one side only, and nothing at all.
    to, source = (rank + 1) % workers, (rank - 1) % workers
    for size in (0, 3, 600_000):
        frame = content(rank, to, 2 * size)[::2]
        (arrived,) = transport.perform(Round([Message(to, frame, 3 * size + 5)], [(source, 3 * size + 5)], "short"))
        assert np.array_equal(arrived, content(source, rank, 2 * size)[::2])
    one_way = [([message(1, content(0, 1, 9))], []), ([], [(0, 9)]), ([], [])][min(rank, 2)]
    check(transport, Round(*one_way, "one way"))
    kept = transport.perform(neighbours(rank, workers, 64))[0]
    before = kept.copy()
    check(transport, neighbours(rank, workers, 70))
    assert np.array_equal(kept, before), "a frame is the program's own, however long it keeps it"
    return transport.traffic.bytes_sent, transport.traffic.bytes_received


@pytest.mark.parametrize("compiled", [(True, True), (True, True, True), (False, False), (True, False, True)])
def test_messages_of_all_sizes_arrive_whole_in_all_directions_at_once(compiled: tuple[bool, ...]) -> None:
    """Also 8 MB both ways at the same time, which no line holds, so that somebody has to read while writing.

    Ranks with compiled rounds and ranks without, as on other systems, understand each other.
    """
    workers = len(compiled)
    sent, received = zip(*on_processes(workers, all_kinds, compiled), strict=True)
    assert sum(sent) == sum(received) > workers * 8 * MEGABYTE


def hurried(rank: int, workers: int, sent: Any) -> None:
    """Rank 1 has sent three rounds' messages before rank 0 begins the first of them."""
    transport = DirectTransport(timeout=60)
    if rank == 1:
        for size in (10, 200_000, 0):
            transport.perform(Round([message(0, content(1, 0, size))], [], "early"))
        sent.set()
        check(transport, Round([], [(0, 20)], "answer"))
    else:
        assert sent.wait(30)
        for size in (10, 200_000, 0):
            check(transport, Round([], [(1, size)], "early"))
        check(transport, Round([message(1, content(0, 1, 20))], [], "answer"))


def test_what_a_faster_peer_sends_early_waits_for_its_round() -> None:
    on_processes(2, hurried, together.Event())


def interrupted(rank: int, workers: int) -> int:
    """A signal arrives every millisecond, for as many rounds as it takes until both ranks have had some."""
    transport = DirectTransport(timeout=60)
    ticks: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    rounds = enough = 0
    while rounds < 20 or not enough:
        for size in (5, 3 * MEGABYTE):
            check(transport, neighbours(rank, workers, size))
        mine = int(len(ticks) > 5)
        answer = transport.perform(
            Round([message(1 - rank, torch.tensor([mine], dtype=torch.uint8))], [(1 - rank, 1)], "more")
        )
        rounds, enough = rounds + 1, min(mine, int(answer[0][0]))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return len(ticks)


def test_signals_interrupt_waits_and_lose_nothing() -> None:
    assert min(on_processes(2, interrupted)) > 5


def grouped(rank: int, workers: int) -> tuple[Any, ...]:
    """Ranks 2 and 0 have a transport of their own, in this order; all have one, and gloo's all-reduce."""
    whole = DirectTransport(timeout=60)
    own: tuple[Any, ...] = ()
    if rank != 1:
        pair = DirectTransport(dist.new_group([2, 0], use_local_synchronization=True), timeout=60)
        check(pair, neighbours(pair.rank, 2, 100))
        own = (pair.rank, pair.workers, pair.gather_texts(f"rank {rank}"))
    check(whole, neighbours(rank, workers, 100))
    tensor = torch.full((5,), float(rank))
    whole.perform(AllReduce(tensor))
    assert (whole.device, whole.addresses) == (torch.device("cpu"), ["127.0.0.1"] * workers)
    return tensor.tolist(), whole.gather_texts("ü" * rank), own


def test_groups_have_connections_of_their_own_and_gloo_still_reduces() -> None:
    first, second, third = on_processes(3, grouped)
    assert first[0] == second[0] == third[0] == [3.0] * 5
    assert first[1] == second[1] == third[1] == ["", "ü", "üü"]
    numbers = (first[2], second[2], third[2])
    texts = numbers[0][2]
    assert sorted(texts) == ["rank 0", "rank 2"]
    assert [each[:2] for each in numbers if each] == [(texts.index("rank 0"), 2), (texts.index("rank 2"), 2)]


def slow(rank: int, workers: int, together: Any, one_way: bool) -> list[tuple[float, float]]:
    """Both ranks begin each round together, but rank 1 lets some time pass first. How much, and what it waited for."""
    transport = DirectTransport(timeout=60)
    to_first = Round([], [(1, 8)], "late") if rank == 0 else Round([message(0, content(1, 0, 8))], [], "late")
    found = []
    for _ in range(8):
        before = transport.traffic.copy()
        together.wait(30)
        started = time.monotonic()
        if rank == 1:
            time.sleep(0.03)
        late = time.monotonic() - started
        check(transport, to_first if one_way else neighbours(rank, workers, 8))
        seconds = transport.traffic.seconds - before.seconds
        found.append((late, seconds - (transport.traffic.seconds_transferring - before.seconds_transferring)))
    return found


@pytest.mark.parametrize("one_way", [False, True])
def test_time_until_the_first_byte_is_waiting_and_not_transfer(one_way: bool) -> None:
    """Either rank may be kept from its core at any time, but not in all of the rounds: the best one is judged."""
    early, late = on_processes(2, slow, together.Barrier(2), one_way)
    assert max(waited / by for (_, waited), (by, _) in zip(early, late, strict=True)) > 0.5
    assert min(waited / by for by, waited in late) < 0.5


def busy(rank: int, workers: int, arrived: Any) -> tuple[float, float, float]:
    """Rank 0's work, when its message has left, takes until rank 1 has it. Times of the round, the work, the wait."""
    transport = DirectTransport(timeout=60)
    spans = [0.0]

    def work() -> None:
        started = time.monotonic()
        assert arrived.wait(30), "the message has not left before the work"
        spans.append(time.monotonic() - started)

    started = time.monotonic()
    (frame,) = transport.perform(
        Round([message(1 - rank, content(rank, 0, 8))], [(1 - rank, 8)], "busy", meanwhile=work if rank == 0 else None)
    )
    arrived.set()
    assert np.array_equal(frame, content(1 - rank, 0, 8))
    return time.monotonic() - started, spans[-1], transport.traffic.seconds


def test_work_is_done_while_messages_travel() -> None:
    """The peer has its message before the work is over, and the work does not count as waiting."""
    (whole, worked, waited), _ = on_processes(2, busy, together.Event())
    assert waited <= whole - worked + 1e-6


def elsewhere(rank: int, workers: int) -> bool:
    sys.platform = "darwin"
    transport = DirectTransport(timeout=60)
    check(transport, neighbours(rank, workers, 1000))
    return "spardl.transport.direct.exchange" in sys.modules


def test_off_linux_nothing_is_compiled() -> None:
    """The system calls of compiled rounds are laid out for 64-bit Linux; the loop in Python does without."""
    sys.modules.pop("spardl.transport.direct.exchange", None)
    kernels.load.cache_clear()
    assert on_processes(2, elsewhere) == [False, False]


# --- what goes wrong -----------------------------------------------------------------------------------------------

Outcome = tuple[str, int | None, str, float]


def failing(action: Callable[[], object]) -> Outcome:
    """Kind, peer and text of the error that this raises, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(SparDLError) as caught:
        action()
    seconds = time.monotonic() - started
    return type(caught.value).__name__, getattr(caught.value, "peer", None), str(caught.value), seconds


def deserted(
    rank: int, workers: int, size: int, all_at_once: bool, compiled: bool, done: Any
) -> tuple[Outcome, Outcome]:
    """The last rank leaves after the first round; the others stay until all of them have noticed."""
    transport = DirectTransport(timeout=FOREVER)
    check(transport, neighbours(rank, workers, 100))
    if rank == workers - 1:
        os._exit(0)
    make = everybody if all_at_once else neighbours

    def go_on() -> None:
        for _ in range(workers):
            transport.perform(make(rank, workers, size))

    first = failing(go_on)
    again = failing(go_on)
    done.wait(30)
    return first, again


@pytest.mark.parametrize(
    ("workers", "size", "all_at_once", "compiled"),
    [
        (2, 8, False, True),
        (5, 8, False, True),
        (4, 8, True, True),
        (4, 6 * MEGABYTE, False, True),
        (5, 8, False, False),
        (4, 6 * MEGABYTE, False, False),
    ],
)
def test_a_rank_that_dies_is_named_by_all_others_at_once(
    workers: int, size: int, all_at_once: bool, compiled: bool
) -> None:
    """Also by ranks that exchange nothing with it: those that gave up because of it tell the others."""
    done = together.Barrier(workers - 1)
    *survivors, dead = on_processes(workers, deserted, size, all_at_once, compiled, done, expect="any")
    assert dead == ("died", None)
    for state, found in survivors:
        assert state == "returned", found
        (kind, peer, text, _), again = found
        assert (kind, peer) == ("PeerError", workers - 1), text
        assert re.match(rf"rank {peer} at 127\.0\.0\.1:\d+ (closed the connection|has failed rank \d, which)", text), (
            text
        )
        assert text.endswith(failures.INTACT)
        assert again[:3] == (kind, peer, text), "and again, instead of waiting"


def silent(rank: int, workers: int, operation: Round | None, compiled: bool, done: Any) -> Outcome | None:
    transport = DirectTransport(timeout=1, compiled=compiled)
    found = None
    if rank == 0:
        assert operation is not None
        found = failing(lambda: transport.perform(operation))
    done.wait(30)
    return found


@pytest.mark.parametrize(
    ("operation", "verb", "compiled"),
    [
        (Round([message(1, torch.zeros(8, dtype=torch.uint8))], [(1, 8)], "ring"), "sent", True),
        (Round([message(1, torch.zeros(8, dtype=torch.uint8))], [(1, 8)], "ring"), "sent", False),
        (Round([message(1, torch.zeros(64 * MEGABYTE, dtype=torch.uint8))], [], "ring"), "took", True),
    ],
)
def test_a_rank_that_stays_silent_is_named_after_the_timeout(operation: Round, verb: str, compiled: bool) -> None:
    """It is alive, but elsewhere in its program, and the text says so."""
    found, *_ = on_processes(3, silent, operation, compiled, together.Barrier(3))
    assert found is not None
    kind, peer, text, seconds = found
    assert (kind, peer) == ("PeerError", 1)
    assert re.match(rf"rank 1 at 127\.0\.0\.1:\d+ {verb} nothing for 1 s in round 1, ring; it answers, but came", text)
    assert seconds > 0.9


def test_all_ranks_that_stay_silent_are_named() -> None:
    found, *_ = on_processes(3, silent, Round([], [(1, 8), (2, 8)], "ring"), True, together.Barrier(3))
    assert found is not None
    kind, peer, text, _ = found
    assert (kind, peer) == ("PeerError", 1)
    assert re.match(r"rank 1 at 127\.0\.0\.1:\d+ and rank 2 at 127\.0\.0\.1:\d+ sent nothing for 1 s", text)


def waiting_in_a_row(rank: int, workers: int, done: Any) -> Outcome | None:
    """Rank 0 waits for 1, 1 for 2, 2 for 3, and 3 for nobody. Rank 0 has less patience than the others."""
    transport = DirectTransport(timeout=2 if rank == 0 else 20)
    found = None
    if rank < 3:
        found = failing(lambda: transport.perform(Round([], [(rank + 1, 8)], "row")))
    done.wait(30)
    return found


def test_who_waits_for_another_is_not_blamed_for_it() -> None:
    """Whoever gives up first asks around, and all the others hear whom it has found."""
    *found, last = on_processes(4, waiting_in_a_row, together.Barrier(4))
    assert last is None
    assert [each[:2] for each in found] == [("PeerError", 3)] * 3
    assert re.match(r"rank 3 at 127\.0\.0\.1:\d+ has failed rank 1, which waited for it, and so this one,", found[0][2])


def stopped(rank: int, workers: int, plain: bool, pids: Any, done: Any) -> Outcome:
    """Rank 2 is stopped until the others have noticed, and goes on then."""
    transport = (TorchTransport if plain else DirectTransport)(timeout=3)
    operation = AllReduce(torch.ones(8)) if plain else everybody(rank, workers, 8)
    transport.perform(operation)
    pids[rank] = os.getpid()
    if rank == 2:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGSTOP)
        return failing(lambda: [transport.perform(operation) for _ in range(3)])  # some messages came before
    dist.barrier()
    found = failing(lambda: transport.perform(operation))
    done.wait(30)
    os.kill(pids[2], signal.SIGCONT)
    return found


@pytest.mark.parametrize("plain", [False, True], ids=["direct", "gloo"])
def test_a_rank_that_is_stopped_is_named_by_the_others_and_by_itself(plain: bool) -> None:
    """When it wakes up, the others have left: it knows that it was the one that was away."""
    found = on_processes(3, stopped, plain, together.Array("i", 3), together.Barrier(2))
    assert [each[:2] for each in found] == [("PeerError", 2)] * 3, found
    assert "does not answer: its process is stopped or hangs" in found[0][2] + found[1][2]
    assert "rank 2, this one, has failed the others" in found[2][2]


def dripping(rank: int, workers: int, done: Any) -> Outcome | None:
    """Rank 1 sends a message of 4000 bytes by a byte now and then."""
    transport = DirectTransport(timeout=1)
    if rank == 0:
        found = failing(lambda: transport.perform(Round([], [(1, 4000)], "drip")))
        done.set()
        return found
    line = transport._links[0]._line
    line.sendall(struct.pack("=qq", 4000, mark_of("drip")))
    while not done.wait(0.05):
        with contextlib.suppress(OSError):
            line.sendall(b"x")
    return None


def test_a_byte_now_and_then_does_not_hold_a_round_up() -> None:
    """Something moves all the time, but too little: a round has a deadline as a whole."""
    found, _ = on_processes(2, dripping, together.Event())
    assert found is not None and found[:2] == ("PeerError", 1)
    assert "sent no more than a few bytes for 1 s" in found[2]


def trickling(rank: int, workers: int, size: int) -> None:
    """Rank 1's message takes longer than the timeout, but never pauses for nearly as long."""
    transport = DirectTransport(timeout=2)
    for make in (lambda: neighbours(rank, workers, size), lambda: Round([], [(1, size)], "ring")):
        if rank == 0:
            check(transport, make())
            continue
        link = transport._links[0]
        number = int(link.words[record.SENDING])
        message = struct.pack("=qq", size, mark_of("ring") | number) + content(1, 0, size).numpy().tobytes()
        for first, last in itertools.pairwise((0, 5, size // 3, size // 2, 3 * size // 4, size, size + 16)):
            time.sleep(0.4)
            link._line.sendall(message[first:last])
        link.words[record.SENDING] += 1
        if number == 0:
            transport.perform(Round([], [(0, size)], "ring"))


@pytest.mark.parametrize("size", [2000, 200_000])
def test_a_message_that_takes_long_is_not_silence(size: int) -> None:
    on_processes(2, trickling, size)


def at_odds(rank: int, workers: int, case: str, compiled: bool) -> Outcome:
    """Rank 1 sends rank 0 what it does not expect; rank 2 waits for rank 0."""
    transport = DirectTransport(timeout=FOREVER)
    check(transport, everybody(rank, workers, 10))
    if rank == 1 and case == "number":
        link = transport._links[0]
        link.words[record.SENDING] += 1
    name = "another" if rank == 1 and case == "name" else "ring"
    size = 5000 if rank == 1 and case == "size" else 800
    sends = {
        0: [message(2, content(0, 2, 800))],
        1: [message(0, content(1, 0, size))],
        2: [message(1, content(2, 1, 800))],
    }[rank]
    receives = {0: [(1, 800)], 1: [(2, 800)], 2: [(0, 800)]}[rank]

    def go_on() -> None:
        for _ in range(3):
            transport.perform(Round(sends, receives, name if rank != 2 or case != "name" else "ring"))

    return failing(go_on)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", "sent 5000 bytes where at most 800 were expected"),
        ("number", "sent message 2 where message 1 was due"),
        ("name", "sent a message of another round where message 1 was due"),
    ],
)
def test_a_message_that_the_round_does_not_expect_is_refused(case: str, words: str, compiled: bool) -> None:
    """Nothing of it is read into the frame, the sender is named, and nobody is left waiting."""
    found = on_processes(3, at_odds, case, compiled)
    kind, peer, text, _ = found[0]
    assert (kind, peer) == ("ProtocolError", 1)
    assert re.match(rf"rank 1 at 127\.0\.0\.1:\d+ {words} in round 2, ring; all ranks must run the same program", text)


def closed(rank: int, workers: int, lived_on: Any, done: Any) -> Outcome:
    """Rank 1 leaves a child behind that has inherited everything; rank 0 notices rank 1's end all the same."""
    transport = DirectTransport(timeout=FOREVER)
    check(transport, neighbours(rank, workers, 100))
    if rank == 1:
        if os.fork() == 0:
            refused = failing(lambda: transport.perform(neighbours(rank, workers, 100)))
            os._exit(0 if refused[0] == "StateError" and lived_on.set() is None and done.wait(30) else 1)
        check(transport, neighbours(rank, workers, 100))
        os._exit(0)
    check(transport, neighbours(rank, workers, 100))
    assert lived_on.wait(30)
    found = failing(lambda: transport.perform(neighbours(rank, workers, 100)))
    done.set()
    return found


def test_a_forked_child_holds_no_connection_open() -> None:
    survivor, _ = on_processes(2, closed, together.Event(), together.Event(), expect="any")
    state, (kind, peer, _, _) = survivor
    assert (state, kind, peer) == ("returned", "PeerError", 1)


def ended(rank: int, workers: int) -> tuple[list[Outcome], Outcome]:
    before = open_files()
    dist.barrier()  # lest a faster peer's new connections count
    transport = DirectTransport(timeout=60)
    check(transport, neighbours(rank, workers, 8))
    transport.close()
    transport.close()
    wait_for_files(before)
    after = [
        failing(lambda: transport.perform(neighbours(rank, workers, 8))),
        failing(lambda: transport.perform(AllReduce(torch.ones(1)))),
        failing(lambda: transport.gather_texts("too late")),
    ]
    dist.barrier()
    other = DirectTransport(timeout=60)
    check(other, neighbours(rank, workers, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        del other
    wait_for_files(before)
    return after, failing(lambda: DirectTransport(timeout=60, device="meta"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for_files(count: int) -> None:
    """A thread of gloo's closes its own when it comes to it."""
    deadline = time.monotonic() + 10
    while open_files() > count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_closed_transport_says_so_and_leaves_no_file_open() -> None:
    """Neither does one that nobody uses any more."""
    for after, elsewhere in on_processes(3, ended):
        assert elsewhere[0] == ConfigError.__name__
        assert [each[0] for each in after] == [StateError.__name__] * 3
        assert {each[2] for each in after} == {"this transport was closed; make another one."}


# --- the best one --------------------------------------------------------------------------------------------------


def best(rank: int, workers: int, crippled: int | None) -> tuple[str, list[str]]:
    if rank == crippled:
        direct.own_address = lambda known: "203.0.113.9"  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transport = best_transport(timeout=30)
    check(transport, neighbours(rank, workers, 1000))
    return type(transport).__name__, [str(each.message) for each in caught if each.category is SparDLWarning]


def test_ranks_that_reach_each_other_are_connected_directly() -> None:
    assert on_processes(2, best, None) == [(DirectTransport.__name__, [])] * 2
    assert on_processes(1, alone) == [TorchTransport.__name__]


def alone(rank: int, workers: int) -> str:
    return type(best_transport(timeout=30)).__name__


def test_if_one_rank_cannot_listen_all_of_them_use_gloo_and_say_why() -> None:
    """203.0.113.9 is reserved for documentation, so nobody can listen there."""
    found = on_processes(3, best, 1)
    for name, (warning,) in found:
        assert name == TorchTransport.__name__
        assert "rank 1 cannot listen at 203.0.113.9 (Cannot assign requested address)." in warning
        assert "Messages go through gloo instead" in warning
