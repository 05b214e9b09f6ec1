"""Watch: a rank that answers at any time whom it waits for, so that a failure is blamed on whoever caused it.

A rank that waits in vain for another knows nothing of why: the other may itself wait for a third one. So each rank has
a thread that does nothing but answer questions, on a port of the kernel's choice, and that notes whether this process
was away itself: stopped by a signal, or on a machine that slept. It wakes up once per second.

A question is one message and an answer another, each with a proof that its sender knows the secret of the run; whoever
cannot prove that is hung up on. Before a rank leaves because of another it tells all peers so: they see its end soon,
and would blame it. `inquiry.py` makes sense of the answers.

    question  "SPDW", version (u32), who asks (u32), who is asked (u32), because of whom it leaves (i32; -1 if it does
              not), 32 random bytes; then HMAC-SHA256(secret, "question", all of that)          little-endian
    answer    length of a text (u32); the text, which is JSON; HMAC-SHA256(secret, "answer", the random bytes, the text)
"""

import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spardl.agreement import Gather, gather_values
from spardl.choices import is_count

VERSION = 1
TICK_S = 1.0
ANSWER_S = 1.0  # that a live rank may take to answer
TELL_S = 0.5  # that telling all others may take, which nobody waits for
CALLERS = 256  # that may be on the line at once; beyond, the one that has been there for longest is hung up on
LONGEST_ANSWER = 1 << 16

_MAGIC = b"SPDW"
_QUESTION = struct.Struct("<4sIIIi32s")
_LENGTH = struct.Struct("<I")
_PROOF = 32
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class Silence(Enum):
    """Why a rank has not answered."""

    GONE = "is gone"  # nobody listens there, or hung up
    MUTE = "does not answer"  # somebody listens and says nothing: stopped, or hanging
    UNREACHABLE = "cannot be reached"  # nothing comes back at all
    UNKNOWN = "cannot be asked"  # it listens nowhere


@dataclass(frozen=True)
class Standing:
    """What a rank says of itself: for whom it has waited for how long, or because of whom it has left.

    One that waits for nobody computes, or is somewhere else in its program.
    """

    waits_for: tuple[int, ...] = ()
    seconds: float = 0.0
    blames: int | None = None


Answer = Standing | Silence


@dataclass
class _Ear:
    """What the thread needs. It must not keep the transport alive, which closes the watch when nobody uses it."""

    rank: int
    listener: socket.socket | None = None
    secret: bytes = b""
    workers: int = 0
    standing: Callable[[], Standing | None] = lambda: None
    told: dict[int, int] = field(default_factory=dict)  # who has left because of whom, as they said
    gaps: "deque[tuple[float, float]]" = field(default_factory=lambda: deque(maxlen=64))  # end, seconds
    last: float | None = None  # None before it has begun
    closed: bool = False


class Watch:
    """This rank's, from when the ranks have told each other where they listen until `close`.

    operation  what the transport does now, None between operations; `pending` says whom it still waits for
    since      when it began, by `time.monotonic`
    """

    def __init__(self, rank: int) -> None:
        self.operation: Any = None
        self.since = 0.0
        self.rank = rank
        self.left: int | None = None  # because of whom this rank has left
        self._places: list[tuple[str, int]] = []
        self._ear = _Ear(rank)
        self._pending: Callable[[Any], Iterable[int]] = lambda operation: ()
        self._end = weakref.finalize(self, _hang_up, self._ear)

    def open(self, address: str, gather: Gather) -> None:
        """Listen at this address, tell all ranks where that is, and begin to answer. Collective."""
        ear = self._ear
        ear.listener = _listen(address)
        _open.add(self)
        _mind_forks()
        host, port = ear.listener.getsockname()[:2] if _listens(ear.listener) else ("", 0)
        mine = {"host": host, "port": port, "secret": secrets.token_hex(32) if self.rank == 0 else ""}
        cards = gather_values(gather, mine)
        self._places = [(str(card["host"]), int(card["port"])) for card in cards]
        ear.secret, ear.workers = bytes.fromhex(cards[0]["secret"]), len(cards)
        ear.last, ear.standing = time.monotonic(), _weakly(self)
        threading.Thread(target=_answer_all, args=(ear,), name="spardl-watch", daemon=True).start()
        self._forget_wrong_places()

    def _forget_wrong_places(self) -> None:
        """Ask everybody once. Who is there and cannot be reached now never can be, and must not count as dead later."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer, answer in self.ask(others[:CALLERS]).items():
            if answer in (Silence.GONE, Silence.UNREACHABLE):
                self._places[peer] = ("", 0)

    @property
    def size(self) -> int:
        """How many ranks watch over each other."""
        return len(self._places)

    def close(self) -> None:
        """Answer no more."""
        self._end()

    def for_whom(self, pending: Callable[[Any], Iterable[int]]) -> None:
        """How to tell for whom an operation still waits. A method, which is not kept alive."""
        method = weakref.WeakMethod(pending)

        def ask(operation: Any) -> Iterable[int]:
            alive = method()
            return () if alive is None else alive(operation)

        self._pending = ask

    def standing(self) -> Standing:
        """Where this rank is now."""
        operation, since = self.operation, self.since
        if self.left is not None or operation is None:
            return Standing(blames=self.left)
        return Standing(tuple(self._pending(operation)), time.monotonic() - since)

    def away(self, since: float) -> float:
        """For how many seconds this process did not run since then: it was stopped, or its machine slept."""
        ear, now = self._ear, time.monotonic()
        late = now - (ear.last or now) - TICK_S  # the thread may not have had its turn yet
        return sum(seconds for end, seconds in list(ear.gaps) if end > since) + (late if late > TICK_S else 0.0)

    def told(self) -> dict[int, int]:
        """Which ranks have left, and because of whom, as they said."""
        return dict(self._ear.told)

    # --- asking ---------------------------------------------------------------------------------------------------

    def ask(self, peers: Iterable[int]) -> dict[int, Answer]:
        """What these ranks say of themselves. Takes as long as the slowest, `ANSWER_S` at the most."""
        return self._call(list(peers), -1, ANSWER_S)

    def tell(self, blamed: int, peers: Iterable[int]) -> None:
        """Let these ranks know that this one leaves because of the rank `blamed`."""
        self.left = blamed
        self._call(list(peers), blamed, TELL_S)

    def _call(self, peers: list[int], blamed: int, patience: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        calls: dict[int, _Call] = {}
        poller = select.poll()
        for peer in peers:
            host, port = self._places[peer] if peer < len(self._places) else ("", 0)
            if not port:
                answers[peer] = Silence.UNKNOWN
                continue
            call = _Call(peer, host, port, _question(self._ear.secret, self.rank, peer, blamed))
            if call.failed is not None:
                answers[peer] = call.failed
                continue
            calls[call.line.fileno()] = call
            poller.register(call.line, select.POLLOUT)
        deadline = time.monotonic() + patience
        while calls and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(1000 * left):
                answer = calls[fd].go_on(poller, self._ear.secret, self._ear.workers)
                if answer is not None:
                    poller.unregister(fd)
                    call = calls.pop(fd)
                    call.line.close()
                    answers[call.peer] = answer
        for call in calls.values():
            call.line.close()
            answers[call.peer] = Silence.MUTE if call.connected else Silence.UNREACHABLE
        return answers


class _Call:
    """A question under way to one rank."""

    def __init__(self, peer: int, host: str, port: int, question: bytes) -> None:
        self.peer = peer
        self.connected = False
        self.failed: Silence | None = None
        self.line = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._question = question
        self._heard = bytearray()
        self.line.setblocking(False)
        number = self.line.connect_ex((host, port))
        if number not in (0, errno.EINPROGRESS):
            self.line.close()
            self.failed = _silence(number)

    def go_on(self, poller: Any, secret: bytes, workers: int) -> Answer | None:
        """Say what there is to say, hear what there is to hear; the answer once it is there."""
        try:
            if not self.connected:
                number = self.line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if number:
                    return _silence(number)
                self.connected = True
                self.line.sendall(self._question)  # short enough for any line that has just been made
                poller.modify(self.line, select.POLLIN)
                return None
            heard = self.line.recv(LONGEST_ANSWER)
        except BlockingIOError:
            return None
        except OSError as error:
            return _silence(error.errno)
        self._heard += heard
        if not heard:
            return Silence.GONE
        if len(self._heard) > _LENGTH.size + LONGEST_ANSWER + _PROOF:
            return Silence.MUTE
        return _understood(secret, self._question, bytes(self._heard), workers)


def _silence(number: int | None) -> Silence:
    return Silence.GONE if number in _GONE else Silence.UNREACHABLE


def _question(secret: bytes, me: int, peer: int, blamed: int) -> bytes:
    words = _QUESTION.pack(_MAGIC, VERSION, me, peer, blamed, secrets.token_bytes(32))
    return words + hmac.digest(secret, b"question" + words, hashlib.sha256)


def _understood(secret: bytes, question: bytes, heard: bytes, workers: int) -> Answer | None:
    """The answer in these bytes; None while it is not complete. Whoever cannot prove itself has not answered."""
    if len(heard) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(heard)
    if size > LONGEST_ANSWER:
        return Silence.MUTE
    text, proof = heard[_LENGTH.size :][:size], heard[_LENGTH.size + size :]
    if len(proof) < _PROOF:
        return None
    if not hmac.compare_digest(proof, hmac.digest(secret, b"answer" + _nonce(question) + text, hashlib.sha256)):
        return Silence.MUTE
    return _standing(text, workers)


def _standing(text: bytes, workers: int) -> Answer:
    """A member has written this, but may be another version, or mistaken."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        said = json.loads(text)
        waits, seconds, blames = said["waits_for"], said["seconds"], said["blames"]
        ranks = [*waits, *([] if blames is None else [blames])]
        if all(is_count(rank) and rank < workers for rank in ranks) and isinstance(seconds, float):
            return Standing(tuple(waits), seconds, blames)
    return Standing()


def _nonce(question: bytes) -> bytes:
    nonce: bytes = _QUESTION.unpack_from(question)[-1]
    return nonce


# --- the thread ---------------------------------------------------------------------------------------------------

_open: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def open_watches() -> list[Watch]:
    """All of this process that answer now."""
    return [watch for watch in _open if not watch._ear.closed and watch._places]


def _listen(address: str) -> socket.socket:
    """A socket that listens there, or one that does not listen where that is not possible."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    with contextlib.suppress(OSError):
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    return listener


def _listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _weakly(watch: Watch) -> Callable[[], Standing | None]:
    reference = weakref.ref(watch)

    def standing() -> Standing | None:
        alive = reference()
        return None if alive is None else alive.standing()

    return standing


def _hang_up(ear: _Ear) -> None:
    """End the thread: a listener that is shut down wakes it up, where the system does that; else the next tick does."""
    ear.closed = True
    if ear.listener is not None:
        with contextlib.suppress(OSError):
            ear.listener.shutdown(socket.SHUT_RDWR)
        ear.listener.close()


def _answer_all(ear: _Ear) -> None:
    """The life of the thread: answer whoever asks, and note when it was away."""
    assert ear.listener is not None and ear.last is not None
    poller, callers = select.poll(), dict[int, tuple[socket.socket, bytearray]]()
    listening = ear.listener.fileno()
    if listening >= 0 and _listens(ear.listener):
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


def _is_open(ear: _Ear) -> bool:
    """Until another thread closes it."""
    return not ear.closed


def _accept(ear: _Ear, poller: Any, callers: dict[int, tuple[socket.socket, bytearray]]) -> None:
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


def _hear(ear: _Ear, line: socket.socket, heard: bytearray) -> bool:
    """Take in what a caller says, and answer once that is a question; whether to stay on the line."""
    size = _QUESTION.size + _PROOF
    try:
        said = line.recv(size - len(heard))
        heard += said
        if said and len(heard) < size:
            return True
        if len(heard) == size:
            answer = _answer(ear, bytes(heard))
            if answer:
                line.send(answer)  # short enough for any line that has just been made
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _answer(ear: _Ear, question: bytes) -> bytes:
    """What a member is told; nothing for a stranger."""
    words, proof = question[: _QUESTION.size], question[_QUESTION.size :]
    if not hmac.compare_digest(proof, hmac.digest(ear.secret, b"question" + words, hashlib.sha256)):
        return b""
    magic, version, caller, called, blamed, nonce = _QUESTION.unpack(words)
    if magic != _MAGIC or version != VERSION or called != ear.rank or not 0 <= caller < ear.workers:
        return b""
    if 0 <= blamed < ear.workers:
        ear.told.setdefault(caller, blamed)
    standing = ear.standing() or Standing()
    text = json.dumps(
        {"waits_for": list(standing.waits_for), "seconds": standing.seconds, "blames": standing.blames}
    ).encode()
    return _LENGTH.pack(len(text)) + text + hmac.digest(ear.secret, b"answer" + nonce + text, hashlib.sha256)


@functools.cache
def _mind_forks() -> None:
    """Once per process, as it cannot be undone, and only where there is a watch at all."""
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    """A forked child has the listener too, and would keep it open after its parent's death."""
    for watch in list(_open):
        watch._ear.closed = True
        if watch._ear.listener is not None:
            watch._ear.listener.close()
