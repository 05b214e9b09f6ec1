"""How the ranks of a run find each other: a store, a roll call with a deadline, then the process group.

A launcher that restarts ranks keeps its store, and with it what the ranks before have left there. Nothing that it tells
its ranks names the attempt that they belong to: each node of torchrun counts restarts by itself, so one that came later
counts fewer, and a change of members is not counted at all. So rank 0 gives the attempt a name, and answers with it to
whoever has left a token in the store, which only that process waits to see answered.
"""

import contextlib
import gc
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from spardl import _torch_private
from spardl.errors import AbsentPeer, ConfigError, PeerError, SparDLError
from spardl.launch.place import Place
from spardl.transport.failures import collective
from spardl.transport.inquiry import inquire
from spardl.transport.meeting import GRACE_S
from spardl.transport.patience import PROBE_S, store_is_silent, within
from spardl.transport.watch import open_watches

Result = TypeVar("Result")

# How long rank 0 keeps the store open so that everybody hears who is missing.
FAREWELL = timedelta(seconds=3)
# How often rank 0 looks for tokens in a launcher's store.
LOOK = timedelta(seconds=0.05)

# What gloo says when it cannot connect ranks that have met in the store.
NO_MESH = "connectFullMesh"
UNREACHABLE = (
    "the ranks have met, but gloo could not connect rank {rank} to the others ({reason}). Each rank listens at the"
    " interface that GLOO_SOCKET_IFNAME names, or else where its machine's own name leads, which is often loopback: set"
    " GLOO_SOCKET_IFNAME on every machine to the interface that reaches the others; `spardl doctor` lists them."
)

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


@contextlib.contextmanager
def process_group(place: Place, timeout: float) -> Iterator[None]:
    """Inside, all ranks are connected by gloo. Who does not come within `timeout` seconds is named on all that did.

    A peer that is lost inside becomes a `PeerError`, which names it where the ranks can tell. The group is destroyed at
    a good end only: after a failure, others may still wait in it.
    """
    store = _store(place, timeout)
    began = time.monotonic()
    try:
        most = (2 if place.hosted else 1) * timeout + FAREWELL.total_seconds()  # for rank 0 to come, and to count
        ours = _bounded(lambda: _call_the_roll(store, place, timeout), store, place, most)
        within(timeout + GRACE_S, lambda: _make_group(ours, place, timeout), lambda: _no_group(store, place, timeout))
        began = time.monotonic()
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST_PEER):
            raise _lost(place, timeout, began, _gist(str(error))) from error
        raise
    gc.collect()  # models and hooks refer to each other, and to groups whose threads should end here
    kept = _torch_private.gloo_behind(dist.group.WORLD)
    dist.destroy_process_group()
    del kept


def _make_group(store: Store, place: Place, timeout: float) -> None:
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.workers,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        if NO_MESH in str(error):
            raise PeerError(UNREACHABLE.format(rank=place.rank, reason=_gist(str(error)))) from error
        raise


def _no_group(store: Store, place: Place, timeout: float) -> PeerError:
    """The error where connecting takes too long: a store that still answers is not to blame."""
    silent = store_is_silent(store, place.rank, timeout + GRACE_S)
    try:
        within(PROBE_S, lambda: store.check(["anything"]), lambda: silent)
    except Exception:
        return silent
    return PeerError(UNREACHABLE.format(rank=place.rank, reason=f"not within {timeout:g} s"))


def _bounded(job: Callable[[], Result], store: Store, place: Place, seconds: float) -> Result:
    """Do this in good time: a store whose process is stopped would let torch wait without end."""
    return within(seconds + GRACE_S, job, lambda: store_is_silent(store, place.rank, seconds + GRACE_S))


def _lost(place: Place, timeout: float, began: float, reason: str) -> PeerError:
    """The error for a collective of the whole group that has failed: those who watch over each other know why."""
    for watch in open_watches():
        others = [peer for peer in range(place.workers) if peer != place.rank]
        if watch.size != place.workers:
            continue
        since = max(began, time.monotonic() - 2 * timeout)
        verdict = inquire(watch, others, place.workers, since=since, timeout=timeout)
        if verdict.faults:
            error = collective(verdict, place.rank, lambda peer: f"rank {peer}", "a collective", reason)
            watch.tell(next(iter(verdict.faults)), [peer for peer in others if peer not in verdict.faults])
            return error
    return PeerError(f"rank {place.rank} lost a peer, which may have ended or hang ({reason}).")


def _gist(reason: str) -> str:
    """The first sentence of gloo's text, without the line of its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", reason.splitlines()[0]).partition(". ")[0].rstrip(".")


def _store(place: Place, timeout: float) -> Store:
    """The store at the run's address: kept by rank 0, unless the launcher keeps it."""
    keeper = place.rank == 0 and not place.hosted

    def connect() -> Store:
        return TCPStore(
            place.host,
            place.port,
            is_master=keeper,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=place.listener if keeper else None,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch's own rendezvous has it
        )

    try:
        store = within(timeout + GRACE_S, connect, lambda: _no_store(place, timeout, keeper, "it takes too long"))
    except dist.DistError as error:
        raise _no_store(place, timeout, keeper, str(error)) from error
    return PrefixStore("spardl", store)


def _no_store(place: Place, timeout: float, keeper: bool, reason: str) -> SparDLError:
    if not keeper:
        missing = "the launcher's store" if place.hosted else "rank 0"
        return AbsentPeer(
            f"{missing} never came: nobody answered at {place.address} for {timeout:g} s; start it, or raise --timeout,"
            f" unless all others have given up on rank {place.rank} already.",
            peer=None if place.hosted else 0,
            candidates=(place.rank,) if place.hosted else (0, place.rank),
        )
    if "EADDRINUSE" in reason:
        return ConfigError(f"port {place.port} is in use; set MASTER_PORT to another one, the same on all ranks.")
    return ConfigError(f"rank 0 cannot listen at {place.address}: {reason.splitlines()[0]}")


def _call_the_roll(store: Store, place: Place, timeout: float) -> Store:
    """When all ranks are there, the part of the store that is theirs. Rank 0 counts, and tells the others."""
    name = "run" if not place.hosted else secrets.token_hex(16) if place.rank == 0 else _invited(store, place, timeout)
    ours = PrefixStore(name, store)
    if ours.add(f"here/{place.rank}", 1) > 1:
        raise ConfigError(f"two processes claim rank {place.rank} at {place.address}; give each its own RANK.")
    inviter = _Inviter(store, name) if place.hosted else None
    missing = _count(ours, place, timeout, inviter) if place.rank == 0 else _hear(ours, place, timeout)
    if missing:
        ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(str(rank) for rank in missing)
        alone = len(missing) == place.workers - 1
        late = f", unless they have given up on rank {place.rank} already" if alone else ""
        raise AbsentPeer(
            f"{ranks} of {place.workers} never came to {place.address} within {timeout:g} s; "
            f"start {'it' if len(missing) == 1 else 'them'}, or raise --timeout{late}.",
            peer=missing[0],
            candidates=(*missing, *([place.rank] if alone else [])),
        )
    return ours


def _invited(store: Store, place: Place, timeout: float) -> str:
    """The name that rank 0 has given this attempt."""
    token = secrets.token_hex(16)
    store.set(f"token/{place.rank}", token)
    try:
        store.wait([f"attempt/{token}"], timedelta(seconds=timeout))
    except dist.DistError as error:
        raise AbsentPeer(
            f"rank 0 never came to {place.address} within {timeout:g} s; start it, or raise --timeout, unless all"
            f" others have given up on rank {place.rank} already.",
            peer=0,
            candidates=(0, place.rank),
        ) from error
    return store.get(f"attempt/{token}").decode()


class _Inviter:
    """Rank 0 where a launcher keeps the store: it tells this attempt's name to whoever is there. Tokens of processes
    that are gone may be among those it finds; nobody waits for what these are told."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._told = set[bytes]()

    def invite(self, ranks: Iterable[int]) -> None:
        for key in (f"token/{rank}" for rank in ranks):
            token = self._store.get(key) if self._store.check([key]) else b""
            if token and token not in self._told:
                self._store.set(f"attempt/{token.decode()}", self._name)
                self._told.add(token)


def _count(store: Store, place: Place, timeout: float, inviter: _Inviter | None) -> list[int]:
    """Wait for every rank; publish and return those that did not come."""
    deadline = time.monotonic() + timeout
    keys = {rank: f"here/{rank}" for rank in range(place.workers)}
    missing = list(keys)
    while missing:
        if inviter is not None:
            inviter.invite(missing)
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(dist.DistError):
            store.wait([keys[rank] for rank in missing], left if inviter is None else min(left, LOOK))
        missing = [rank for rank in missing if not store.check([keys[rank]])]
        if time.monotonic() > deadline:
            break
    store.set("missing", ",".join(str(rank) for rank in missing))
    if missing:
        present = [f"heard/{rank}" for rank in keys if rank not in (0, *missing)]
        with contextlib.suppress(dist.DistError):
            store.wait(present, FAREWELL)
    return missing


def _hear(store: Store, place: Place, timeout: float) -> list[int]:
    """What rank 0 found. It keeps the store, or has named this attempt, so it is there already and has at most
    `timeout` seconds left to count."""
    try:
        store.wait(["missing"], timedelta(seconds=timeout) + FAREWELL)
        missing = store.get("missing").decode()
        store.set(f"heard/{place.rank}", "")
    except dist.DistError as error:
        raise PeerError(f"rank 0 does not answer at {place.address}; its process may be gone.", peer=0) from error
    return [int(rank) for rank in missing.split(",")] if missing else []
