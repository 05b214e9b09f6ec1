"""A TCP connection between every two ranks, made with the help of a process group that connects them already.

Each rank listens at one address, on a port of the kernel's choice, until all connections stand; of two ranks the
higher one calls. Ports and a secret travel over the process group. Whoever calls or answers proves that it knows the
secret, with both ranks and both sides' random numbers in the proof; a stranger cannot, and is hung up on. That keeps
strangers out of the run; it hides nothing from those who can read the network, as gloo does not either.
"""

import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spardl.agreement import Gather, gather_values
from spardl.errors import PeerError

VERSION = 1
SET_UP_S = 15.0  # that connecting may take; shorter timeouts allow half of theirs
STRANGERS = 64  # that may be on the line at once; beyond, the one that has been silent for longest is hung up on

_MAGIC = b"SPDL"
_HELLO = struct.Struct("<4sII32s")  # magic, version, the caller's rank, its random number
_NONCE = 32
_PROOF = 32

# One side of a greeting: it yields what to say and how many bytes to hear, is sent what was heard, and returns the
# rank at the other end.
Greeting = Generator[tuple[bytes, int], bytes, int]


class Unreachable(PeerError):
    """Some ranks cannot connect to each other. All ranks raise it together, so that all can do without."""


class _Stranger(Exception):
    """The other end is none of us."""


def connect_all(rank: int, address: str, gather: Gather, *, timeout: float) -> dict[int, socket.socket]:
    """A non-blocking connection to every other rank. Collective; `gather` collects every rank's text in rank order.

    Takes at most `SET_UP_S` or half the timeout, and two gathers.
    """
    listener, card = listen(rank, address)
    with listener:
        cards = gather_values(gather, card)
        _check(cards)
        meeting = _Meeting(rank, bytes.fromhex(cards[0]["secret"]), [(c["address"], c["port"]) for c in cards])
        failure, peer = meeting.hold(listener, min(SET_UP_S, timeout / 2))
    try:
        _agree(gather_values(gather, {"failure": failure, "peer": peer}))
    except BaseException:
        for line in meeting.connected.values():
            line.close()
        raise
    return meeting.connected


def connect_members(
    rank: int, listener: socket.socket, secret: bytes, places: Sequence[tuple[str, int]], *, timeout: float
) -> dict[int, socket.socket]:
    """The same between ranks that know each other's places, and a secret. Those that cannot connect say so alone.

    Raises:
        Unreachable: some rank did not connect to this one.
    """
    meeting = _Meeting(rank, secret, list(places))
    failure, peer = meeting.hold(listener, min(SET_UP_S, timeout / 2))
    if failure:
        for line in meeting.connected.values():
            line.close()
        raise Unreachable(f"{failure}.", peer=peer)
    return meeting.connected


@dataclass(slots=True)
class _Call:
    """A connection whose other end is still to prove itself. `peer` is whom we called; callers say who they are."""

    line: socket.socket
    greeting: Greeting
    peer: int | None = None
    wanted: int = 0
    heard: bytearray = field(default_factory=bytearray)


class _Meeting:
    """Calls to all lower ranks and from all higher ones, and whoever else may call, all at the same time."""

    def __init__(self, rank: int, secret: bytes, places: list[tuple[str, int]]) -> None:
        self.connected: dict[int, socket.socket] = {}
        self._rank = rank
        self._secret = secret
        self._places = places
        self._selector = selectors.DefaultSelector()
        self._callers: dict[socket.socket, _Call] = {}

    def hold(self, listener: socket.socket, patience: float) -> tuple[str, int]:
        """Connect to everybody; what has failed, with which rank, or an empty text."""
        deadline = time.monotonic() + patience
        self._selector.register(listener, selectors.EVENT_READ, None)
        try:
            for peer in range(self._rank):
                self._dial(peer)
            while len(self.connected) < len(self._places) - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    return self._missing(patience)
                for key, _ in self._selector.select(left):
                    if key.data is None:
                        self._answer(listener)
                    elif key.data.line.fileno() >= 0:  # not hung up on a moment ago
                        self._go_on(key.data)
        except Unreachable as failure:
            assert failure.peer is not None
            return str(failure), failure.peer
        finally:
            self._hang_up_on_the_rest()
        return "", -1

    def _dial(self, peer: int) -> None:
        try:
            host, port = self._places[peer]
            line = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            call = _Call(line, _greet_as_caller(self._secret, self._rank, peer), peer)
            self._selector.register(line, selectors.EVENT_WRITE, call)
            line.setblocking(False)
            _raise(line.connect_ex((host, port)), but=errno.EINPROGRESS)
        except OSError as error:
            raise self._cannot_connect(peer, error) from error

    def _answer(self, listener: socket.socket) -> None:
        try:
            line, _ = listener.accept()
        except OSError:  # who called has hung up already
            return
        line.setblocking(False)
        call = _Call(line, _greet_as_called(self._secret, self._rank))
        if len(self._callers) >= len(self._places) + STRANGERS:
            self._drop(next(iter(self._callers.values())))
        self._callers[line] = call
        self._selector.register(line, selectors.EVENT_READ, call)
        self._say(call)

    def _go_on(self, call: _Call) -> None:
        """Hear what there is to hear, say what there is to say."""
        try:
            if not call.wanted:
                _raise(call.line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                self._selector.modify(call.line, selectors.EVENT_READ, call)
                self._say(call)
                return
            heard = call.line.recv(call.wanted - len(call.heard))
            if not heard:
                raise ConnectionError("it hung up")
            call.heard += heard
            if len(call.heard) == call.wanted:
                self._say(call, bytes(call.heard))
        except BlockingIOError:
            return
        except (OSError, _Stranger) as error:
            self._drop(call)
            if call.peer is not None:
                raise self._cannot_connect(call.peer, error) from error

    def _say(self, call: _Call, heard: bytes | None = None) -> None:
        """Let the greeting go on. What it says is short, and always fits an idle line."""
        try:
            words, call.wanted = next(call.greeting) if heard is None else call.greeting.send(heard)
            call.heard.clear()
            if words and call.line.send(words) < len(words):
                raise ConnectionError("it takes no more than a few bytes")
            if not call.wanted:
                self._say(call, b"")
        except StopIteration as end:
            self._welcome(call, end.value)

    def _welcome(self, call: _Call, peer: int) -> None:
        if peer in self.connected or not 0 <= peer < len(self._places):
            raise _Stranger(f"rank {peer} is here already")
        self._selector.unregister(call.line)
        self._callers.pop(call.line, None)
        call.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connected[peer] = call.line

    def _drop(self, call: _Call) -> None:
        self._selector.unregister(call.line)
        self._callers.pop(call.line, None)
        call.line.close()

    def _hang_up_on_the_rest(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.line.close()
        self._selector.close()

    def _missing(self, patience: float) -> tuple[str, int]:
        peer = next(p for p in range(len(self._places)) if p != self._rank and p not in self.connected)
        if peer < self._rank:
            return str(self._cannot_connect(peer, TimeoutError(f"no answer for {patience:g} s"))), peer
        return f"rank {self._rank} heard nothing from rank {peer} for {patience:g} s", peer

    def _cannot_connect(self, peer: int, error: BaseException) -> Unreachable:
        where = place_text(self._places[peer])
        return Unreachable(f"rank {self._rank} cannot connect to rank {peer} at {where} ({_reason(error)})", peer=peer)


def place_text(place: tuple[Any, ...]) -> str:
    """A socket's host and port, for people."""
    return f"[{place[0]}]:{place[1]}" if ":" in place[0] else f"{place[0]}:{place[1]}"


def _greet_as_caller(secret: bytes, me: int, peer: int) -> Greeting:
    mine = secrets.token_bytes(_NONCE)
    answer = yield _HELLO.pack(_MAGIC, VERSION, me, mine), _NONCE + _PROOF
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"answer", me, peer, mine, theirs)):
        raise _Stranger("it does not know the secret")
    yield _proof(secret, b"call", me, peer, mine, theirs), 0
    return peer


def _greet_as_called(secret: bytes, me: int) -> Greeting:
    magic, version, caller, theirs = _HELLO.unpack((yield b"", _HELLO.size))
    if magic != _MAGIC or version != VERSION or caller <= me:
        raise _Stranger("it speaks of something else")
    mine = secrets.token_bytes(_NONCE)
    proof = yield mine + _proof(secret, b"answer", caller, me, theirs, mine), _PROOF
    if not hmac.compare_digest(proof, _proof(secret, b"call", caller, me, theirs, mine)):
        raise _Stranger("it does not know the secret")
    return int(caller)


def _proof(secret: bytes, role: bytes, caller: int, called: int, nonce: bytes, answer: bytes) -> bytes:
    """What only a member can compute; neither side's can serve as the other's, nor between two other ranks."""
    facts = struct.pack("<6s4sIII", role, _MAGIC, VERSION, caller, called) + nonce + answer
    return hmac.digest(secret, facts, hashlib.sha256)


def listen(rank: int, address: str) -> tuple[socket.socket, dict[str, Any]]:
    """A socket that listens, and what the others are to know of this rank: how to call it, or why they cannot."""
    card = {"version": VERSION, "secret": secrets.token_hex(_NONCE) if rank == 0 else "", "failure": ""}
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
        card["address"], card["port"] = listener.getsockname()[:2]
    except OSError as error:
        card["failure"] = f"rank {rank} cannot listen at {address} ({_reason(error)})"
    return listener, card


def _check(cards: list[dict[str, Any]]) -> None:
    for rank, card in enumerate(cards):
        if card["failure"]:
            raise Unreachable(f"{card['failure']}.", peer=rank)
        if card["version"] != cards[0]["version"]:
            raise Unreachable(
                f"rank {rank} has version {card['version']} of the direct transport, rank 0 version"
                f" {cards[0]['version']}; run the same spardl on all ranks.",
                peer=rank,
            )


def _agree(outcomes: list[dict[str, Any]]) -> None:
    """All ranks see the same outcomes. Callers, the higher ranks, know best why a call has failed."""
    failures = [outcome for outcome in reversed(outcomes) if outcome["failure"]]
    if failures:
        others = f", and {len(failures) - 1} more such failures" if len(failures) > 1 else ""
        raise Unreachable(f"{failures[0]['failure']}{others}.", peer=failures[0]["peer"])


def _raise(number: int, but: int = 0) -> None:
    if number not in (0, but):
        raise OSError(number, os.strerror(number))


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
