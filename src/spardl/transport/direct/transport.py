"""The transport over direct connections: which rounds go which way, and what all ranks are told when one fails.

Nothing has to be started for it: ranks find each other through the process group that they are in, whose all-reduce
stays in use as well. A round of one message each way is one compiled call; any other, and whatever that call could not
finish, is a loop that sends and receives wherever it can until all messages are complete. Off 64-bit Linux all rounds
are that loop.
"""

import functools
import os
import struct
import sys
import weakref
from collections.abc import Collection
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
from numpy import empty

from spardl import kernels
from spardl.collectives.program import AllReduce, Operation, Round
from spardl.errors import ConfigError, PeerError, SparDLError, StateError
from spardl.machine import cores_per_rank
from spardl.sparse import Array
from spardl.transport import failures
from spardl.transport.address import own_address
from spardl.transport.base import use_the_time
from spardl.transport.direct.link import Bytes, Gone, Link, Silent, Trouble, Wrong, mark_of
from spardl.transport.direct.mesh import connect_all
from spardl.transport.direct.pump import Pace, finish
from spardl.transport.inquiry import Verdict, inquire
from spardl.transport.torchdist import Group, TorchTransport

POLLS_BEFORE_SLEEP = 100  # some tens of microseconds

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
    """

    def __init__(
        self,
        group: Group = None,
        *,
        timeout: float,
        device: torch.device | str = "cpu",
        inner: TorchTransport | None = None,
        compiled: bool = True,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ConfigError(f"direct connections move bytes of the CPU's memory, not of {device}; use torch's.")
        self._inner = TorchTransport(group, timeout=timeout, device=device) if inner is None else inner
        self.rank, self.workers = self._inner.rank, self._inner.workers
        self.device, self.addresses = self._inner.device, self._inner.addresses
        self.traffic = self._inner.traffic  # one account for both
        self.watch = self._inner.watch
        self._timeout = timeout
        self._links: dict[int, Link] = {}
        self._ended: SparDLError | None = None
        self._looks = POLLS_BEFORE_SLEEP if cores_per_rank(self.gather_texts) >= 1 else 0
        self._can_swap = compiled and _can_be_compiled()
        if self._can_swap:
            self._swap_now = kernels.load("spardl.transport.direct.exchange").exchange
        lines = connect_all(self.rank, own_address(self.addresses[self.rank]), self.gather_texts, timeout=timeout)
        self._links = {peer: Link(peer, line, timeout, blocks=self._can_swap) for peer, line in lines.items()}
        self.watch.for_whom(self.pending)
        _open.add(self)
        _watch_forks()

    def perform(self, operation: Operation) -> Any:
        if isinstance(operation, AllReduce):
            return self._inner.perform(operation)
        if self._ended is not None:
            raise self._ended
        watch = self.watch
        watch.since, watch.operation = monotonic(), operation
        try:
            if self._can_swap and len(operation.send) == 1 == len(operation.receive) and operation.meanwhile is None:
                arrived = self._swap(operation)
            else:
                arrived = self._exchange(operation)
            watch.operation = None
            return arrived
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
            return self._inner.pending(operation)
        waited = [link.peer for link in list(self._links.values()) if link.wants]
        return waited or [peer for peer, _ in operation.receive]  # the compiled exchange does not tell

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        return self._inner.gather_texts(text)

    def arrive(self) -> None:
        """Whatever was performed is over."""

    def close(self) -> None:
        """Close the connections, and our groups. The one that this transport was made from stays."""
        self._end(failures.closed())
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
        pace = Pace(self.watch.since, self._timeout, self.watch.away)
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
        verdict = inquire(self.watch, suspects, self.workers, since=self.watch.since, timeout=self._timeout)
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
