"""Watch: a rank that answers at any time whom it waits for, so that a failure is blamed on whoever caused it.

A rank that waits in vain for another knows nothing of why: the other may itself wait for a third one. So each rank has
a thread that does nothing but answer questions (`ear.py`), and that notes whether this process was away itself: stopped
by a signal, or on a machine that slept. Before a rank leaves because of another it tells all peers so: they see its end
soon, and would blame it. `words.py` has what is said, `inquiry.py` makes sense of the answers.
"""

import errno
import functools
import hashlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spardl.agreement import Gather, gather_values
from spardl.transport.ear import CALLERS, KNOCK_S, TICK_S, Ear, answer_all, hang_up, listen, listens
from spardl.transport.words import (
    LONGEST,
    LONGEST_ANSWER,
    Answer,
    Card,
    Place,
    Silence,
    Standing,
    in_ranks,
    knock,
    question,
    understood,
)

ANSWER_S = 1.0  # that a live rank may take to answer
TELL_S = 0.5  # that telling all others may take, which nobody waits for
HINT_S = 0.05  # for whom this rank has just waited in vain
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class Watch:
    """This rank's, from when the ranks have told each other where they listen until `close`.

    operation  what the transport does now, None between operations; `pending` says whom it still waits for
    since      when it began, by `time.monotonic`
    rested     when the one before it was over
    members    of the present community, in rank order, by the numbers that they had when they came
    epoch      how often that community was formed anew
    ballot     what this rank says while one is formed anew
    """

    def __init__(self, rank: int) -> None:
        self._operation: Any = None
        self.since = self.rested = 0.0
        self.rank = rank
        self.left: int | None = None  # because of whom this rank has left
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.ballot: Mapping[str, Any] | None = None
        self._places: list[tuple[str, int]] = []
        self._ear = Ear(rank)
        self._pending: Callable[[Any], Iterable[int]] = lambda operation: ()
        self._silent: set[int] = set()  # who has not answered when asked last
        self._end = weakref.finalize(self, hang_up, self._ear)

    def open(self, address: str, gather: Gather) -> None:
        """Listen at this address, tell all ranks where that is, and begin to answer. Collective."""
        ear = self._ear
        ear.listener = listen(address)
        _open.add(self)
        _mind_forks()
        host, port = ear.listener.getsockname()[:2] if listens(ear.listener) else ("", 0)
        mine = {"host": host, "port": port, "secret": secrets.token_hex(32) if self.rank == 0 else ""}
        cards = gather_values(gather, mine)
        self._places = [(str(card["host"]), int(card["port"])) for card in cards]
        self.members = tuple(range(len(cards)))
        ear.secret, ear.known = bytes.fromhex(cards[0]["secret"]), len(cards)
        ear.last, ear.standing = time.monotonic(), _weakly(self)
        threading.Thread(target=answer_all, args=(ear,), name="spardl-watch", daemon=True).start()
        self._forget_wrong_places()

    def open_to(self, address: str, secret: bytes, places: Mapping[int, Place]) -> Place:
        """Listen at this address as a newcomer, to whom members with these numbers can be reached there.

        Returns where it listens.
        """
        ear = self._ear
        ear.listener = listen(address)
        _open.add(self)
        _mind_forks()
        self._learn(places)
        ear.secret, ear.last, ear.standing = secret, time.monotonic(), _weakly(self)
        threading.Thread(target=answer_all, args=(ear,), name="spardl-watch", daemon=True).start()
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

    @property
    def operation(self) -> Any:
        return self._operation

    @operation.setter
    def operation(self, operation: Any) -> None:
        if operation is None:
            self.rested = time.monotonic()
        self._operation = operation

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
        return {peer: in_ranks(answers[number], ranks) for number, peer in wanted.items()}

    def survey(self, numbers: Iterable[int]) -> dict[int, Answer]:
        """The same, of ranks by the numbers that they had when they came; and so are all that they name."""
        answers = self._call(list(numbers), -1, ANSWER_S)
        self._silent = {number for number, answer in answers.items() if isinstance(answer, Silence)}
        return answers

    def tell(self, blamed: int, peers: Iterable[int]) -> None:
        """Let these ranks know that this one leaves because of the rank `blamed`.

        Who has not answered a moment ago is told too, and finds it there when it wakes up, but is not waited for."""
        self.left = blamed
        if self.members:
            numbers = [self.members[peer] for peer in peers]
            self._call([number for number in numbers if number not in self._silent], self.members[blamed], TELL_S)
            self._call([number for number in numbers if number in self._silent], self.members[blamed], HINT_S)

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
            words = knock(secret, peer, what) if isinstance(what, Card) else question(secret, self.number, peer, what)
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
        if len(self._heard) > LONGEST:
            return Silence.MUTE
        return understood(secret, self._question, bytes(self._heard), known)


def _silence(number: int | None) -> Silence:
    return Silence.GONE if number in _GONE else Silence.UNREACHABLE


_open: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def open_watches() -> list[Watch]:
    """All of this process that answer now."""
    return [watch for watch in _open if not watch._ear.closed and watch._places]


def _weakly(watch: Watch) -> Callable[[], Standing | None]:
    reference = weakref.ref(watch)

    def standing() -> Standing | None:
        alive = reference()
        return None if alive is None else alive._told_to_others()

    return standing


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
