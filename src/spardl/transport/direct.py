"""Plain TCP connections between the ranks: rounds without the waits of gloo's threads where cores are few.

Nothing has to be started for it: ranks find each other through the process group that they are in, whose all-reduce
stays in use as well. A round of one message each way is one compiled call; any other, and whatever that call could not
finish, is a loop that sends and receives wherever it can until all messages are complete.

Where ranks share cores, waits block at once: looking again for even a few microseconds takes the core from the rank
that is waited for. A rank with a core of its own looks a few times first: being woken takes longer than a message.
"""

import os
import select
import warnings
import weakref
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy import empty

from spardl import kernels
from spardl.collectives.program import AllReduce, Operation, Round
from spardl.errors import ConfigError, PeerError, ProtocolError, SparDLError, SparDLWarning
from spardl.kernels.crew import cores_each
from spardl.sparse import Array
from spardl.transport.link import Bytes, Gone, Link, Silent, Trouble, Wrong, mark_of
from spardl.transport.mesh import Unreachable, connect_all, own_address
from spardl.transport.torchdist import Group, TorchTransport

LOOKS = 100  # some tens of microseconds

LONGEST_POLL_MS = (1 << 31) - 1

INTACT = "Residuals are intact; resume from the last checkpoint."

_BYTE = np.dtype(np.uint8)

_open: "weakref.WeakSet[DirectTransport]" = weakref.WeakSet()


class DirectTransport:
    """Rank `rank` of `workers`, numbered as in the group it was made from. On CPU only.

    Making one is collective: all ranks of `group` (default: all) must do it, in the same order. Where some ranks cannot
    connect to each other, all of them raise `Unreachable`. Rounds and texts are for one thread at a time. After an
    error the connections are gone; the peers are told whose fault it was, so that all ranks name the same one.
    Traffic counts payloads, without the 16 bytes that go before each.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        timeout: float,
        device: torch.device | str = "cpu",
        inner: TorchTransport | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ConfigError(f"direct connections move bytes of the CPU's memory, not of {device}; use torch's.")
        self._inner = TorchTransport(group, timeout=timeout, device=device) if inner is None else inner
        self.rank, self.workers = self._inner.rank, self._inner.workers
        self.device, self.addresses = self._inner.device, self._inner.addresses
        self.traffic = self._inner.traffic  # one account for both
        self._timeout = timeout
        self._links: dict[int, Link] = {}
        self._ended: SparDLError | None = None
        self._looks = LOOKS if min(cores_each(self.gather_texts)) >= 1 else 0
        self._swap_now = kernels.load("spardl.transport._exchange").exchange
        lines = connect_all(self.rank, own_address(self.addresses[self.rank]), self.gather_texts, timeout=timeout)
        self._links = {peer: Link(peer, line, timeout) for peer, line in lines.items()}
        _open.add(self)

    def perform(self, operation: Operation) -> Any:
        if isinstance(operation, AllReduce):
            return self._inner.perform(operation)
        if self._ended is not None:
            raise self._ended
        try:
            if len(operation.send) == 1 and len(operation.receive) == 1 and operation.meanwhile is None:
                return self._swap(operation)
            return self._exchange(operation)
        except Trouble as trouble:
            error = self._named(trouble, operation.name)
            self._give_up(error)
            raise error from trouble.__cause__
        except BaseException as error:
            self._give_up(error)
            raise

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        return self._inner.gather_texts(text)

    def close(self) -> None:
        """Close the connections. Rounds are over then; the process group's all-reduce is not."""
        self._end(ConfigError("this transport was closed; make another one."))

    def __del__(self) -> None:
        for link in getattr(self, "_links", {}).values():
            link.close()

    # --- one round ------------------------------------------------------------------------------------------------

    def _swap(self, operation: Round) -> list[Bytes]:
        """One message out, one in. Written for speed: where ranks share a core, every look-up costs a cache miss."""
        started = perf_counter()
        ((to, frame),), ((source, capacity),) = operation.send, operation.receive
        there, here, mark = self._links[to], self._links[source], mark_of(operation.name)
        payload, buffer = _bytes(frame), empty(capacity, _BYTE)
        received, waited = self._swap_now(
            mark, there.fd, there.words, payload, here.fd, here.words, buffer, self._looks
        )
        if received >= 0:
            arrived = buffer[:received]
        else:
            there.go_on_with(received, payload, here, buffer, mark)
            waited += self._finish([there, here], perf_counter() if here.started else started)
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
        """Any number of messages."""
        started = perf_counter()
        mark = mark_of(operation.name)
        sources = [self._links[peer] for peer, _ in operation.receive]
        targets = [self._links[peer] for peer, _ in operation.send]
        for link, (_, frame) in zip(targets, operation.send, strict=True):
            link.post(_bytes(frame), mark)
        started += operation.use_the_time()
        for link, (_, capacity) in zip(sources, operation.receive, strict=True):
            link.expect(capacity, mark)
        waited = self._finish([*sources, *targets], started)
        frames = [link.take() for link in sources]
        seconds = perf_counter() - started
        self.traffic.count(
            rounds=1,
            messages=len(targets),
            sent=sum(len(frame) for _, frame in operation.send),
            received=sum(frame.size for frame in frames),
            seconds=seconds,
            transferring=seconds - waited,
        )
        return frames

    def _finish(self, links: Iterable[Link], progress: float) -> float:
        """Move what can be moved until nothing is left; for how many seconds there was nothing to move.

        `progress` is when something last moved.
        """
        pending = {link.fd: link for link in links if link.wants}
        poller = select.poll()
        wanted = {fd: link.wants for fd, link in pending.items()}
        for fd, events in wanted.items():
            poller.register(fd, events)
        waited, now = 0.0, perf_counter()
        while pending:
            moving = any(link.moving for link in pending.values())
            before = now
            ready = poller.poll(min(LONGEST_POLL_MS, 1000 * max(0.0, progress + self._timeout - now)))
            now = perf_counter()
            if not moving:
                waited += now - before
            if not ready and now >= progress + self._timeout:
                raise self._silence(pending)
            for fd, events in ready:
                link = pending[fd]
                if link.expecting and events & ~select.POLLOUT:
                    link.pull()
                if link.unsent and events & ~select.POLLIN:
                    link.push()
                progress = now
                wants = link.wants
                if not wants:
                    poller.unregister(fd)
                    del pending[fd]
                elif wants != wanted[fd]:
                    poller.modify(fd, wants)
                    wanted[fd] = wants
        return waited

    # --- when it goes wrong ---------------------------------------------------------------------------------------

    def _silence(self, pending: dict[int, Link]) -> Silent:
        """Nothing has moved for the whole timeout."""
        link = next((link for link in pending.values() if link.expecting), next(iter(pending.values())))
        verb = "sent" if link.expecting else "took"
        return Silent(f"{verb} nothing for {self._timeout:g} s", link.peer)

    def _named(self, trouble: Trouble, name: str) -> SparDLError:
        where = f"round {self.traffic.rounds + 1}, {name}"
        if isinstance(trouble, Wrong):
            text = f"{self._who(trouble.peer)} {trouble} in {where}; all ranks must run the same program."
            return ProtocolError(text, peer=trouble.peer)
        blamed = self._culprit(trouble) if isinstance(trouble, Gone) else trouble.peer
        words = f"{trouble} in {where}; its process may be gone."
        if blamed != trouble.peer:
            words = f"has failed rank {trouble.peer}, which left before the end of {where}."
        return PeerError(f"{self._who(blamed)} {words} {INTACT}", peer=blamed)

    def _culprit(self, trouble: Gone) -> int:
        """Whose end this is. A rank that gives up says because of whom, except to a peer that it owes half a message;
        then whoever else is gone may be the reason."""
        said = trouble.blamed if trouble.blamed != trouble.peer else self._links[trouble.peer].epitaph()
        if said in (None, trouble.peer) and self._links[trouble.peer].started:
            said = next(
                (end for link in self._links.values() if (end := link.epitaph()) not in (None, trouble.peer)), None
            )
        return said if said in self._links else trouble.peer

    def _who(self, peer: int) -> str:
        return f"rank {peer} at {self._links[peer].place}"

    def _give_up(self, error: BaseException) -> None:
        """Leave all peers, and tell them because of whom."""
        blamed = getattr(error, "peer", None)
        for link in self._links.values():
            link.leave(self.rank if blamed is None else blamed)
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


def best_transport(
    group: Group = None, *, timeout: float, device: torch.device | str = "cpu"
) -> DirectTransport | TorchTransport:
    """Direct connections on CPU where all ranks can reach each other, torch.distributed elsewhere. Collective."""
    inner = TorchTransport(group, timeout=timeout, device=device)
    if inner.device.type != "cpu" or inner.workers == 1:
        return inner
    try:
        return DirectTransport(group, timeout=timeout, device=device, inner=inner)
    except Unreachable as error:
        warnings.warn(
            f"Ranks cannot connect to each other directly: {error} Messages go through gloo instead, which takes"
            " longer over small ones; let TCP connections through between the hosts, or set GLOO_SOCKET_IFNAME to the"
            " interface that connects them.",
            SparDLWarning,
            stacklevel=2,
        )
        return inner


def _close_inherited() -> None:
    """A forked child has the connections too, and would keep them open after its parent's death."""
    for transport in _open:
        transport._end(ConfigError("this transport belongs to the process that made it; make another one."))


os.register_at_fork(after_in_child=_close_inherited)
