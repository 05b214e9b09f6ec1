"""The transport over direct connections: which rounds go which way, and what all ranks are told when one fails.

Nothing has to be started for it: ranks find each other through the process group that they are in, whose all-reduce
stays in use as well. A round of one message each way is one compiled call; any other, and whatever that call could not
finish, is a loop that sends and receives wherever it can until all messages are complete. Off 64-bit Linux all rounds
are that loop.
"""

import contextlib
import functools
import hashlib
import hmac
import os
import socket
import struct
import sys
import weakref
from collections.abc import Collection, Mapping
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
from numpy import empty

from spardl import kernels
from spardl.collectives.program import AllReduce, Operation, Round, Team
from spardl.collectives.stretches import gather_bytes
from spardl.errors import ConfigError, PeerError, SparDLError, StateError
from spardl.machine import cores_per_rank
from spardl.metrics import Traffic
from spardl.sparse import Array
from spardl.transport import checksums, failures
from spardl.transport.address import own_address, routed_address
from spardl.transport.base import run, use_the_time
from spardl.transport.direct.link import Bytes, Gone, Link, Silent, Trouble, Wrong, mark_of
from spardl.transport.direct.mesh import Unreachable, connect_all, connect_members, listen
from spardl.transport.direct.pump import Pace, finish
from spardl.transport.direct.secure import Key, secured
from spardl.transport.inquiry import Verdict, inquire
from spardl.transport.members import Group
from spardl.transport.quorum import Proposal, agree, be_let_in
from spardl.transport.ring import sum_by_ring
from spardl.transport.sparse_sum import sum_sparse
from spardl.transport.torchdist import TorchTransport
from spardl.transport.watch import Watch
from spardl.transport.words import NOBODY, Card, Place

POLLS_BEFORE_SLEEP = 100  # some tens of microseconds
ATTEMPTS = 8  # to connect to those that are left: each but the last may lose another rank

_BYTE = np.dtype(np.uint8)

# For a forked child, which must close what it has inherited. Transports that nobody uses any more leave it.
_open: "weakref.WeakSet[DirectTransport]" = weakref.WeakSet()


class DirectTransport:
    """Rank `rank` of `workers`, numbered as in the group it was made from. On CPU only.

    Making one is collective: all ranks of `group` (default: all) must do it, in the same order. Where some ranks cannot
    connect to each other, all of them raise `Unreachable`. Rounds and texts are for one thread at a time. After an
    error the connections are gone; the peers are told whose fault it was, so that all ranks name the same one.
    Traffic counts payloads, without the 16 bytes that go before each.

    inner     does everything but rounds, and is closed with this transport; made here if not given
    compiled  whether the usual round is one compiled call, where the system calls are those of 64-bit Linux
    alone     whether all is done over these connections, once they stand: a process group ends with its first member,
              and those that are left can form this transport anew (`reformed`)
    key       encrypts these connections; all is done over them then
    """

    def __init__(
        self,
        group: Group = None,
        *,
        timeout: float,
        device: torch.device | str = "cpu",
        inner: TorchTransport | None = None,
        compiled: bool = True,
        alone: bool = False,
        key: Key | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ConfigError(f"direct connections move bytes of the CPU's memory, not of {device}; use torch's.")
        made = TorchTransport(group, timeout=timeout, device=device) if inner is None else inner
        self._inner: TorchTransport | None = made
        self.device, self.traffic = made.device, made.traffic  # one account for both
        self.checks = False
        self._timeout, self._compiled, self._key = timeout, compiled, key
        self._patience: float | None = None
        self._looks = POLLS_BEFORE_SLEEP if cores_per_rank(made.gather_texts) >= 1 else 0
        address = own_address(made.addresses[made.rank])
        lines = connect_all(made.rank, address, made.gather_texts, timeout=timeout)
        if key is not None:
            made.watch.strengthen(key.digest)
        self._begin(made.watch, made.addresses, lines)
        if alone or key is not None:
            made.leave()
            self._inner = None

    def _begin(self, watch: Watch, addresses: list[str], lines: Mapping[int, socket.socket]) -> None:
        """These lines lead to all other ranks of the watch's community."""
        self.watch, self.addresses = watch, addresses
        self.rank, self.workers = watch.rank, len(addresses)
        self._ended: SparDLError | None = None
        key = self._key
        ends = lines if key is None else secured(lines, self.rank, key, timeout=self._timeout)
        self._can_swap = self._compiled and key is None and _can_be_compiled()
        if self._can_swap:
            self._swap_now = kernels.load("spardl.transport.direct.exchange").exchange
        self._links = {peer: Link(peer, line, self._limit, blocks=self._can_swap) for peer, line in ends.items()}
        self.watch.for_whom(self.pending)
        _open.add(self)
        _watch_forks()

    @property
    def _limit(self) -> float:
        """Seconds that a round may wait."""
        return self._timeout if self._patience is None else min(self._timeout, self._patience)

    def be_patient(self, seconds: float) -> None:
        """From now on nobody is waited for for longer, in rounds and, about a second more, by those who go on."""
        self._patience = seconds
        for link in self._links.values():
            link.limit(self._limit)

    def reformed(self, concluded: int, *, guests: bool = False) -> tuple["DirectTransport", Proposal]:
        """A transport between the ranks that are left, when this one has failed; with `guests`, between all, and
        whoever has knocked. Collective among them.

        They agree on who they are and on how many steps count, `concluded` of them on this rank, and connect anew. This
        transport is of no use afterwards.

        Raises:
            PeerError: this rank is not among them, too few are left, or they cannot connect to each other.
        """
        self._end(failures.closed())
        watch, address = self.watch, own_address(self.addresses[self.rank])
        for _ in range(ATTEMPTS):
            listener, card = listen(self.rank, address)
            with listener, contextlib.suppress(Unreachable):
                place = (card["address"], card["port"])
                limits: dict[str, Any] = {"timeout": self._timeout, "patience": self._patience}
                found = agree(watch, place, concluded, guests=guests, **limits)
                lines = _lines_of(found, watch, listener, self._timeout)
                how: dict[str, Any] = {"compiled": self._compiled, "looks": self._looks, "key": self._key, **limits}
                return DirectTransport._of(found, watch, lines, self.traffic, checks=self.checks, **how), found
        raise PeerError(f"rank {self.rank} could not connect to those that are left, in {ATTEMPTS} attempts.")

    def returning(self) -> tuple["DirectTransport", Proposal]:
        """A transport between this rank, that the others have gone on without, and them, as a newcomer with another
        number. This one is closed.

        Raises:
            PeerError: nobody has let it in.
        """
        places = {number: place for number, place in self.watch.places.items() if number != self.watch.number}
        made, found = DirectTransport.joining(self.watch.secret, places, timeout=self._timeout, key=self._key)
        self.close()
        made.traffic, made.checks, made._looks = self.traffic, self.checks, self._looks
        if self._patience is not None:
            made.be_patient(self._patience)
        return made, found

    @classmethod
    def joining(
        cls, secret: bytes, places: Mapping[int, Place], *, timeout: float, key: Key | None = None
    ) -> tuple["DirectTransport", Proposal]:
        """A transport between this newcomer and the members of a run, of which some can be reached at these places.

        Raises:
            PeerError: nobody has let it in.
        """
        address = own_address(routed_address(next(iter(places.values()))[0]))
        watch = Watch(NOBODY)
        try:
            here = watch.open_to(address, secret, places)
            for _ in range(ATTEMPTS):
                listener, card = listen(NOBODY, address)
                with listener, contextlib.suppress(Unreachable):
                    found = be_let_in(watch, Card(here, (card["address"], card["port"])), timeout=timeout)
                    lines = _lines_of(found, watch, listener, timeout)
                    return cls._of(found, watch, lines, Traffic(), timeout=timeout, key=key), found
        except BaseException:
            watch.close()
            raise
        watch.close()
        raise PeerError(f"this newcomer could not connect to all members, in {ATTEMPTS} attempts.")

    @classmethod
    def _of(
        cls,
        found: Proposal,
        watch: Watch,
        lines: Mapping[int, socket.socket],
        traffic: Traffic,
        *,
        timeout: float,
        patience: float | None = None,
        compiled: bool = True,
        looks: int = 0,
        key: Key | None = None,
        checks: bool = False,
    ) -> "DirectTransport":
        """One for a community that was formed without a process group, whose watch belongs to it now."""
        made = cls.__new__(cls)
        made._inner, made.device, made.traffic, made.checks = None, torch.device("cpu"), traffic, checks
        made._timeout, made._compiled, made._looks, made._key = timeout, compiled, looks, key
        made._patience = patience
        watch.adopt(found.epoch, found.members, [card.watch for card in found.cards])
        made._begin(watch, [card.mesh[0] for card in found.cards], lines)
        return made

    def perform(self, operation: Operation) -> Any:
        if isinstance(operation, AllReduce):
            return self._sum(operation) if self._inner is None else self._inner.perform(operation)
        if self._ended is not None:
            raise self._ended
        watch = self.watch
        watch.since, watch.operation = monotonic(), operation
        try:
            round_ = checksums.sealed(operation) if self.checks else operation
            if self._can_swap and len(round_.send) == 1 == len(round_.receive) and round_.meanwhile is None:
                arrived = self._swap(round_)
            else:
                arrived = self._exchange(round_)
            watch.operation = None
            return checksums.opened(operation, arrived, self._who) if self.checks else arrived
        except Trouble as trouble:
            error = self._named(trouble, operation.name)
            self._give_up(error)
            raise error from trouble.__cause__
        except BaseException as error:
            self._give_up(error)
            raise

    def pending(self, operation: object) -> Collection[int]:
        """Whom an operation that is under way still waits for."""
        if not isinstance(operation, Round):
            return [] if self._inner is None else self._inner.pending(operation)
        waited = [link.peer for link in list(self._links.values()) if link.wants]
        return waited or [peer for peer, _ in operation.receive]  # the compiled exchange does not tell

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        if self._inner is not None:
            return self._inner.gather_texts(text)
        return [each.tobytes().decode() for each in self._gather(np.frombuffer(text.encode(), np.uint8))]

    def _gather(self, mine: Bytes) -> list[Bytes]:
        return run(gather_bytes(Team(tuple(range(self.workers)), self.rank), mine), self)

    def _sum(self, operation: AllReduce) -> None:
        """An all-reduce over these connections alone."""
        tensor, name = operation.tensor, operation.name
        if self.workers == 1:
            return
        if tensor.layout is torch.strided:
            run(sum_by_ring(Team(tuple(range(self.workers)), self.rank), tensor, name), self)
            return

        def gather(mine: torch.Tensor) -> list[torch.Tensor]:
            return [torch.from_numpy(each.copy()) for each in self._gather(mine.numpy())]

        sum_sparse(tensor, gather, lambda peer: failures.unlike_entries(peer, self._who(peer), name, self.rank))

    def arrive(self) -> None:
        """Whatever was performed is over."""

    def close(self) -> None:
        """Close the connections, and our groups. The one that this transport was made from stays."""
        self.watch.close()  # first: whoever finds a line ended and asks must not hear that we are still there
        self._end(failures.closed())
        if self._inner is not None:
            self._inner.close()

    def __del__(self) -> None:
        for link in getattr(self, "_links", {}).values():
            link.close()

    # --- one round ------------------------------------------------------------------------------------------------

    def _swap(self, operation: Round) -> list[Bytes]:
        """A round of one message out and one in, by one compiled call.

        Written for speed: where ranks share a core, every look-up costs a cache miss.
        """
        started = perf_counter()
        ((to, frame, _),), ((source, capacity),) = operation.send, operation.receive
        there, here, mark = self._links[to], self._links[source], mark_of(operation.name)
        payload, buffer = _bytes(frame), empty(capacity, _BYTE)
        received, waited = self._swap_now(
            mark, there.fd, there.words, payload, here.fd, here.words, buffer, self._looks
        )
        if received >= 0:
            arrived = buffer[:received]
        else:
            moved = there.go_on_with(received, payload, here, buffer, mark)
            waited += finish([there, here], self._pace(moved))
            arrived = here.take()
        seconds = perf_counter() - started
        self.traffic.count(
            rounds=1,
            messages=1,
            sent=payload.size,
            received=arrived.size,
            seconds=seconds,
            transferring=seconds - waited,
        )
        return [arrived]

    def _exchange(self, operation: Round) -> list[Bytes]:
        """A round of any number of messages, by a loop that moves whatever can be moved."""
        started = perf_counter()
        mark = mark_of(operation.name)
        sources = [self._links[peer] for peer, _ in operation.receive]
        targets = [self._links[peer] for peer, _, _ in operation.send]
        for link, (_, frame, _) in zip(targets, operation.send, strict=True):
            link.post(_bytes(frame), mark)
        busy = use_the_time(operation)
        started, self.watch.since = started + busy, self.watch.since + busy
        for link, (_, capacity) in zip(sources, operation.receive, strict=True):
            link.expect(capacity, mark)
        waited = finish([*sources, *targets], self._pace(0))
        frames = [link.take() for link in sources]
        seconds = perf_counter() - started
        self.traffic.count(
            rounds=1,
            messages=len(targets),
            sent=sum(len(frame) for _, frame, _ in operation.send),
            received=sum(frame.size for frame in frames),
            seconds=seconds,
            transferring=seconds - waited,
        )
        return frames

    def _pace(self, moved: int) -> Pace:
        pace = Pace(self.watch.since, self._limit, self.watch.away)
        pace.moved(moved, monotonic())
        return pace

    # --- when it goes wrong ---------------------------------------------------------------------------------------

    def _named(self, trouble: Trouble, name: str) -> SparDLError:
        """The error for what a peer did, with its place; whoever made it leave or wait is blamed instead."""
        peer, where = trouble.peer, failures.place(self.traffic, name)
        if isinstance(trouble, Wrong):
            return failures.unexpected(peer, self._who(peer), str(trouble), where)
        if isinstance(trouble, Gone) and not trouble.broken:
            blamed = self._culprit(trouble)
            if blamed == self.rank:
                verdict = Verdict({self.rank: f"was given up on by rank {peer}{self._absence()}"}, peer)
                return failures.judged(verdict, self.rank, self._who, "", where)
            if blamed != peer:
                return failures.dragged(blamed, self._who(blamed), peer, where)
            return failures.missing(peer, self._who(peer), str(trouble), where)
        suspects = trouble.peers if isinstance(trouble, Silent) else (peer,)
        verdict = inquire(self.watch, suspects, self.workers, since=self.watch.since, timeout=self._limit)
        return failures.judged(verdict, self.rank, self._who, str(trouble), where)

    def _absence(self) -> str:
        away = self.watch.away(self.watch.since)
        return f", and did not run for {away:.0f} s: stopped, or asleep" if away else ""

    def _culprit(self, trouble: Gone) -> int:
        """Whose end this is. A rank that gives up says because of whom, except to a peer that it owes half a message;
        then it has told our watch, and whoever else is gone may be the reason."""
        said = trouble.blamed if trouble.blamed != trouble.peer else self._links[trouble.peer].epitaph()
        if said in (None, trouble.peer):
            said = self.watch.told().get(trouble.peer)
        if said is None and self._links[trouble.peer].started:
            said = next(
                (end for link in self._links.values() if (end := link.epitaph()) not in (None, trouble.peer)), None
            )
        return said if said in (*self._links, self.rank) else trouble.peer

    def _who(self, peer: int) -> str:
        return f"rank {peer} at {self._links[peer].place}"

    def _give_up(self, error: BaseException) -> None:
        """Leave all peers, and tell them because of whom."""
        peer = getattr(error, "peer", None)
        blamed, known = self.rank if peer is None else peer, getattr(error, "candidates", (peer,))
        self.watch.tell(blamed, [peer for peer in self._links if peer not in known])
        for link in self._links.values():
            link.leave(blamed)
        if not isinstance(error, SparDLError):
            error = PeerError(f"rank {self.rank} broke off in the midst of a round: {error!r}.", peer=self.rank)
        self._end(error)

    def _end(self, why: SparDLError) -> None:
        for link in self._links.values():
            link.close()
        self._ended = self._ended or why


def _lines_of(found: Proposal, watch: Watch, listener: socket.socket, timeout: float) -> dict[int, socket.socket]:
    """Connections to all others of a community that was decided on; its key keeps those of other decisions out."""
    rank = found.members.index(watch.number)
    secret = hmac.digest(watch.secret, found.key.encode(), hashlib.sha256)
    return connect_members(rank, listener, secret, [card.mesh for card in found.cards], timeout=timeout)


def _bytes(frame: Array) -> Bytes:
    """The frame's memory, in one stretch."""
    return frame if isinstance(frame, np.ndarray) else frame.contiguous().numpy()


def _can_be_compiled() -> bool:
    """The compiled exchange lays out the arguments of its system calls by hand, as 64-bit Linux has them."""
    return sys.platform == "linux" and struct.calcsize("P") == 8


@functools.cache
def _watch_forks() -> None:
    """Once per process, as it cannot be undone, and only where there is a transport at all."""
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    """A forked child has the connections too, and would keep them open after its parent's death."""
    for transport in _open:
        transport._end(StateError("this transport belongs to the process that made it; make another one."))
