"""Watch: a rank that answers at any time whom it waits for, so that a failure is blamed on whoever caused it.

A rank that waits in vain for another knows nothing of why: the other may itself wait for a third one. So each rank has
a thread that does nothing but answer questions, on a port of the kernel's choice, and that notes whether this process
was away itself: stopped by a signal, or on a machine that slept. It wakes up once per second.

A question is one message and an answer another, each with a proof that its sender knows the secret of the run; whoever
cannot prove that is hung up on. Before a rank leaves because of another it tells all peers so: they see its end soon,
and would blame it. `inquiry.py` makes sense of the answers.

    question  "SPDW", version (u32), who asks (u32), who is asked (u32), because of whom it leaves (i32; -1 if it does
              not), 32 random bytes; then HMAC-SHA256(secret, "question", all of that)          little-endian
    knock     "SPDJ", version (u32), who is asked (u32), 256 bytes of JSON: where the newcomer listens, 32 random bytes;
              then HMAC-SHA256(secret, "knock", all of that). It is answered like a question
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
_KNOCK_MAGIC = b"SPDJ"
_KNOCK = struct.Struct("<4sII256s32s")
_NONCE = 32
NOBODY = -1  # the number of a newcomer that has none yet
KNOCKS = 64  # newcomers that a rank remembers
KNOCK_S = 3.0  # for which: they knock again and again
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

    One that waits for nobody computes, or is somewhere else in its program. `epoch` and `members` are those of the
    community that it belongs to, and `ballot` is what it says while one is formed anew (`quorum.py`).
    """

    waits_for: tuple[int, ...] = ()
    seconds: float = 0.0
    blames: int | None = None
    epoch: int = field(default=0, compare=False)
    members: tuple[int, ...] = field(default=(), compare=False)
    ballot: Mapping[str, Any] | None = field(default=None, compare=False)


Answer = Standing | Silence
Place = tuple[str, int]


@dataclass(frozen=True)
class Card:
    """Where a rank, or a newcomer, can be reached: by questions, and by the connections of those that go on."""

    watch: Place
    mesh: Place

    @classmethod
    def of(cls, said: Any) -> "Card":
        """What was said, if it can be understood. Raises `ValueError`, `TypeError` or `KeyError` if not."""
        return cls(_place(said["watch"]), _place(said["mesh"]))


def _place(said: Any) -> Place:
    host, port = said
    if not isinstance(host, str) or not is_count(port) or port > 0xFFFF:
        raise ValueError("this is no place")
    return host, port


@dataclass
class _Ear:
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


class Watch:
    """This rank's, from when the ranks have told each other where they listen until `close`.

    operation  what the transport does now, None between operations; `pending` says whom it still waits for
    since      when it began, by `time.monotonic`
    members    of the present community, in rank order, by the numbers that they had when they came
    epoch      how often that community was formed anew
    ballot     what this rank says while one is formed anew
    """

    def __init__(self, rank: int) -> None:
        self.operation: Any = None
        self.since = 0.0
        self.rank = rank
        self.left: int | None = None  # because of whom this rank has left
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.ballot: Mapping[str, Any] | None = None
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
        self.members = tuple(range(len(cards)))
        ear.secret, ear.known = bytes.fromhex(cards[0]["secret"]), len(cards)
        ear.last, ear.standing = time.monotonic(), _weakly(self)
        threading.Thread(target=_answer_all, args=(ear,), name="spardl-watch", daemon=True).start()
        self._forget_wrong_places()

    def open_to(self, address: str, secret: bytes, places: Mapping[int, Place]) -> Place:
        """Listen at this address as a newcomer, to whom members with these numbers can be reached there.

        Returns where it listens.
        """
        ear = self._ear
        ear.listener = _listen(address)
        _open.add(self)
        _mind_forks()
        self._learn(places)
        ear.secret, ear.last, ear.standing = secret, time.monotonic(), _weakly(self)
        threading.Thread(target=_answer_all, args=(ear,), name="spardl-watch", daemon=True).start()
        host, port = ear.listener.getsockname()[:2]
        return host, port

    def _learn(self, places: Mapping[int, Place]) -> None:
        for number, place in places.items():
            self._places += [("", 0)] * (number + 1 - len(self._places))
            self._places[number] = place
        self._ear.known = len(self._places)

    def _forget_wrong_places(self) -> None:
        """Ask everybody once. Who is there and cannot be reached now never can be, and must not count as dead later."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer, answer in self.ask(others[:CALLERS]).items():
            if answer in (Silence.GONE, Silence.UNREACHABLE):
                self._places[peer] = ("", 0)

    @property
    def size(self) -> int:
        """How many ranks watch over each other."""
        return len(self.members)

    @property
    def number(self) -> int:
        """Which rank this was when it came."""
        return self._ear.number

    @property
    def secret(self) -> bytes:
        """What only members know."""
        return self._ear.secret

    @property
    def known(self) -> int:
        """How many numbers were given out so far."""
        return len(self._places)

    @property
    def place(self) -> Place:
        """Where this rank answers."""
        return self._places[self.number]

    @property
    def places(self) -> dict[int, Place]:
        """Where the members answer, by their numbers."""
        return {number: self._places[number] for number in self.members}

    @property
    def knocks(self) -> list[Card]:
        """Newcomers that have knocked here a moment ago."""
        now = time.monotonic()
        return [card for card, heard in list(self._ear.knocks.items()) if now - heard < KNOCK_S]

    def strengthen(self, digest: bytes) -> None:
        """Mix something into the secret that was not sent in clear, as it was itself. On all ranks."""
        self._ear.secret = hmac.digest(digest, self._ear.secret, hashlib.sha256)

    def expect(self, number: int, place: Place) -> None:
        """Somebody with this number, which nobody has had, can be asked there."""
        self._learn({number: place})

    def number_as(self, number: int) -> None:
        """This newcomer has been given a number."""
        self._ear.number = number

    def adopt(self, epoch: int, members: Sequence[int], places: Sequence[Place] = ()) -> None:
        """These are the community from now on; what was said of ranks before is forgotten."""
        self._learn(dict(zip(members, places, strict=False)))
        self.epoch, self.members = epoch, tuple(members)
        self.rank = self.members.index(self.number)
        self.left = self.ballot = self.operation = None
        self._ear.told, self._ear.knocks = {}, {}

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

    def _told_to_others(self) -> Standing:
        """The same, with numbers that mean the same to all, and with where this rank belongs."""
        here, members = self.standing(), self.members
        waits = tuple(members[rank] for rank in here.waits_for if rank < len(members))
        blames = None if here.blames is None else members[here.blames]
        return Standing(waits, here.seconds, blames, self.epoch, members, self.ballot)

    def away(self, since: float) -> float:
        """For how many seconds this process did not run since then: it was stopped, or its machine slept."""
        ear, now = self._ear, time.monotonic()
        late = now - (ear.last or now) - TICK_S  # the thread may not have had its turn yet
        return sum(seconds for end, seconds in list(ear.gaps) if end > since) + (late if late > TICK_S else 0.0)

    def told(self) -> dict[int, int]:
        """Which ranks have left, and because of whom, as they said."""
        ranks = {number: rank for rank, number in enumerate(self.members)}
        told = self._ear.told.items()
        return {ranks[peer]: ranks[blamed] for peer, blamed in told if {peer, blamed} <= ranks.keys()}

    # --- asking ---------------------------------------------------------------------------------------------------

    def ask(self, peers: Iterable[int]) -> dict[int, Answer]:
        """What these ranks say of themselves. Takes as long as the slowest, `ANSWER_S` at the most."""
        members, ranks = self.members, {number: rank for rank, number in enumerate(self.members)}
        wanted = {members[peer] if peer < len(members) else -1: peer for peer in peers}
        answers = self.survey(wanted)
        return {peer: _in_ranks(answers[number], ranks) for number, peer in wanted.items()}

    def survey(self, numbers: Iterable[int]) -> dict[int, Answer]:
        """The same, of ranks by the numbers that they had when they came; and so are all that they name."""
        return self._call(list(numbers), -1, ANSWER_S)

    def tell(self, blamed: int, peers: Iterable[int]) -> None:
        """Let these ranks know that this one leaves because of the rank `blamed`."""
        self.left = blamed
        if self.members:
            self._call([self.members[peer] for peer in peers], self.members[blamed], TELL_S)

    def knock(self, numbers: Iterable[int], card: Card) -> dict[int, Answer]:
        """Ask these members to be let in; what they say of themselves."""
        return self._call(list(numbers), card, ANSWER_S)

    def _call(self, peers: list[int], what: int | Card, patience: float) -> dict[int, Answer]:
        """Say something to these: because of whom this rank leaves (-1: not at all), or where a newcomer listens."""
        answers: dict[int, Answer] = {}
        calls: dict[int, _Call] = {}
        poller = select.poll()
        for peer in peers:
            host, port = self._places[peer] if 0 <= peer < len(self._places) else ("", 0)
            if not port:
                answers[peer] = Silence.UNKNOWN
                continue
            secret = self._ear.secret
            words = _knock(secret, peer, what) if isinstance(what, Card) else _question(secret, self.number, peer, what)
            call = _Call(peer, host, port, words)
            if call.failed is not None:
                answers[peer] = call.failed
                continue
            calls[call.line.fileno()] = call
            poller.register(call.line, select.POLLOUT)
        deadline = time.monotonic() + patience
        while calls and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(1000 * left):
                answer = calls[fd].go_on(poller, self._ear.secret, self._ear.known)
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

    def go_on(self, poller: Any, secret: bytes, known: int) -> Answer | None:
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
        return _understood(secret, self._question, bytes(self._heard), known)


def _silence(number: int | None) -> Silence:
    return Silence.GONE if number in _GONE else Silence.UNREACHABLE


def _question(secret: bytes, me: int, peer: int, blamed: int) -> bytes:
    words = _QUESTION.pack(_MAGIC, VERSION, me, peer, blamed, secrets.token_bytes(32))
    return words + hmac.digest(secret, b"question" + words, hashlib.sha256)


def _knock(secret: bytes, peer: int, card: Card) -> bytes:
    text = json.dumps(asdict(card)).encode().ljust(256)
    words = _KNOCK.pack(_KNOCK_MAGIC, VERSION, peer, text, secrets.token_bytes(_NONCE))
    return words + hmac.digest(secret, b"knock" + words, hashlib.sha256)


def _understood(secret: bytes, question: bytes, heard: bytes, known: int) -> Answer | None:
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
    return _standing(text, known)


def _standing(text: bytes, known: int) -> Answer:
    """A member has written this, but may be another version, or mistaken."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        said = json.loads(text)
        waits, seconds, blames = said["waits_for"], said["seconds"], said["blames"]
        epoch, members, ballot = said.get("epoch", 0), said.get("members", []), said.get("ballot")
        numbers = [*waits, *([] if blames is None else [blames])]
        fits = all(is_count(number) and number < known for number in numbers) and isinstance(seconds, float)
        belongs = is_count(epoch) and all(map(is_count, members)) and (ballot is None or isinstance(ballot, dict))
        if fits and belongs:
            return Standing(tuple(waits), seconds, blames, epoch, tuple(members), ballot)
    return Standing()


def _in_ranks(answer: Answer, ranks: Mapping[int, int]) -> Answer:
    """An answer with the ranks that members have now; who is none is not spoken of."""
    if not isinstance(answer, Standing):
        return answer
    waits = tuple(ranks[number] for number in answer.waits_for if number in ranks)
    return replace(answer, waits_for=waits, blames=ranks.get(answer.blames) if answer.blames is not None else None)


def _nonce(question: bytes) -> bytes:
    """The random bytes, which stand before the proof."""
    return question[-_NONCE - _PROOF : -_PROOF]


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
        return None if alive is None else alive._told_to_others()

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
    try:
        said = line.recv(_size_of(heard) - len(heard))
        heard += said
        size = _size_of(heard)
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


def _size_of(heard: bytearray) -> int:
    """How long what a caller says is to be, by its first bytes."""
    return (_KNOCK if heard[:4] == _KNOCK_MAGIC else _QUESTION).size + _PROOF


def _answer(ear: _Ear, question: bytes) -> bytes:
    """What a member is told; nothing for a stranger."""
    words, proof, nonce = question[:-_PROOF], question[-_PROOF:], _nonce(question)
    knocks = question[:4] == _KNOCK_MAGIC
    role = b"knock" if knocks else b"question"
    if not hmac.compare_digest(proof, hmac.digest(ear.secret, role + words, hashlib.sha256)):
        return b""
    if not (_heard_knock(ear, words) if knocks else _heard_question(ear, words)):
        return b""
    standing = ear.standing() or Standing()
    text = json.dumps(asdict(standing)).encode()
    return _LENGTH.pack(len(text)) + text + hmac.digest(ear.secret, b"answer" + nonce + text, hashlib.sha256)


def _heard_question(ear: _Ear, words: bytes) -> bool:
    magic, version, caller, called, blamed, _ = _QUESTION.unpack(words)
    if magic != _MAGIC or version != VERSION or called != ear.number or not 0 <= caller < ear.known:
        return False
    if 0 <= blamed < ear.known:
        ear.told.setdefault(caller, blamed)
    return True


def _heard_knock(ear: _Ear, words: bytes) -> bool:
    _, version, called, text, _ = _KNOCK.unpack(words)
    if version != VERSION or called != ear.number:
        return False
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        ear.knocks.pop(card := Card.of(json.loads(text)), None)
        ear.knocks[card] = time.monotonic()
        while len(ear.knocks) > KNOCKS:
            ear.knocks.pop(next(iter(ear.knocks)))
        return True
    return False


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
