"""Ear: the thread of a rank that answers whoever asks, and notes when this process was away.

It does nothing else, on a port of the kernel's choice, and wakes up once per second.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spardl.transport.words import Card, Knock, Question, Standing, answer, heard_from, size_of

TICK_S = 1.0
CALLERS = 256  # that may be on the line at once; beyond, the one that has been there for longest is hung up on
KNOCKS = 64  # newcomers that a rank remembers
KNOCK_S = 3.0  # for which: they knock again and again


@dataclass
class Ear:
    """What the thread needs. It must not keep the transport alive, which closes the watch when nobody uses it.

    It knows ranks by the numbers that they had when they came, which stay when others leave.
    """

    number: int
    listener: socket.socket | None = None
    secret: bytes = b""
    known: int = 0  # numbers that were given out
    standing: Callable[[], Standing | None] = lambda: None
    told: dict[int, int] = field(default_factory=dict)  # who has left because of whom, as they said
    gaps: "deque[tuple[float, float]]" = field(default_factory=lambda: deque(maxlen=64))  # end, seconds
    last: float | None = None  # None before it has begun
    knocks: dict[Card, float] = field(default_factory=dict)  # newcomers, and when they were heard last
    closed: bool = False


def listen(address: str) -> socket.socket:
    """A socket that listens there, or one that does not listen where that is not possible."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    with contextlib.suppress(OSError):
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    return listener


def listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def hang_up(ear: Ear) -> None:
    """End the thread: a listener that is shut down wakes it up, where the system does that; else the next tick does."""
    ear.closed = True
    if ear.listener is not None:
        with contextlib.suppress(OSError):
            ear.listener.shutdown(socket.SHUT_RDWR)
        ear.listener.close()


def answer_all(ear: Ear) -> None:
    """The life of the thread: answer whoever asks, and note when it was away."""
    assert ear.listener is not None and ear.last is not None
    poller, callers = select.poll(), dict[int, tuple[socket.socket, bytearray]]()
    listening = ear.listener.fileno()
    if listening >= 0 and listens(ear.listener):
        poller.register(listening, select.POLLIN)
    while _is_open(ear):
        ready = poller.poll(1000 * TICK_S)
        now = time.monotonic()
        if now - ear.last > 2 * TICK_S:
            ear.gaps.append((now, now - ear.last - TICK_S))
        ear.last = now
        for fd, _ in ready:
            if not _is_open(ear):
                break
            if fd == listening:
                _accept(ear, poller, callers)
            elif fd in callers and not _hear(ear, *callers[fd]):
                poller.unregister(fd)
                callers.pop(fd)[0].close()
    for line, _ in callers.values():
        line.close()


def _is_open(ear: Ear) -> bool:
    """Until another thread closes it."""
    return not ear.closed


def _accept(ear: Ear, poller: Any, callers: dict[int, tuple[socket.socket, bytearray]]) -> None:
    assert ear.listener is not None
    with contextlib.suppress(OSError):
        line, _ = ear.listener.accept()
        line.setblocking(False)
        if len(callers) >= CALLERS:
            oldest = next(iter(callers))
            poller.unregister(oldest)
            callers.pop(oldest)[0].close()
        callers[line.fileno()] = (line, bytearray())
        poller.register(line, select.POLLIN)


def _hear(ear: Ear, line: socket.socket, heard: bytearray) -> bool:
    """Take in what a caller says, and answer once that is a question; whether to stay on the line."""
    try:
        said = line.recv(size_of(heard) - len(heard))
        heard += said
        size = size_of(heard)
        if said and len(heard) < size:
            return True
        if len(heard) == size:
            reply = _answer(ear, bytes(heard))
            if reply:
                line.send(reply)  # short enough for any line that has just been made
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _answer(ear: Ear, said: bytes) -> bytes:
    """What a member, or a newcomer with the secret, is told; nothing for a stranger."""
    match heard_from(ear.secret, said):
        case Question(caller, ear.number, blamed) if 0 <= caller < ear.known:
            if 0 <= blamed < ear.known:
                ear.told.setdefault(caller, blamed)
        case Knock(ear.number, card):
            _remember(ear, card)
        case _:
            return b""
    return answer(ear.secret, said, ear.standing() or Standing())


def _remember(ear: Ear, card: Card) -> None:
    """A newcomer was heard just now; of too many, the one that was heard first is forgotten."""
    ear.knocks.pop(card, None)
    ear.knocks[card] = time.monotonic()
    while len(ear.knocks) > KNOCKS:
        ear.knocks.pop(next(iter(ear.knocks)))
