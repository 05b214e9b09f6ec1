"""Limits for calls into libraries that know none, and what is said when the store of the ranks does not answer."""

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from spardl import _torch_private
from spardl.errors import PeerError

Result = TypeVar("Result")

PROBE_S = 1.0  # that connecting to the store may take, to find out why it does not answer
LAST_WAIT_S = 1.0  # at the end of the process, for jobs that are late
NAME = "spardl-patience"  # of their threads


def within(seconds: float, job: Callable[[], Result], late: Callable[[], Exception]) -> Result:
    """What `job` returns or raises; raises `late()` if it takes longer.

    A job that is late goes on in a thread of its own, which keeps no process alive for more than `LAST_WAIT_S` seconds:
    nothing can interrupt it.
    """
    outcome: list[tuple[bool, Any]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((True, job()))
        except BaseException as error:
            outcome.append((False, error))
        done.set()

    threading.Thread(target=run, name=NAME, daemon=True).start()
    if not done.wait(seconds):
        raise late()
    fine, value = outcome[0]
    if not fine:
        raise value
    result: Result = value
    return result


@atexit.register
def _wait_for_the_late() -> None:
    """Python unwinds a thread that comes back from a library while the interpreter ends, and C++ in it then aborts the
    process: it would end with 134 instead of what it wanted to say. Most that are late are late by less than this."""
    deadline = time.monotonic() + LAST_WAIT_S
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(max(0.0, deadline - time.monotonic()))


def store_is_silent(store: Store, rank: int, seconds: float, *, keeper: str | None = None) -> PeerError:
    """The error for a store that has not answered this rank for so long: whose it is, and what is the matter with it.
    Where torch has made it, that is known; else `keeper` says whose it is.

    A process that is stopped still has a kernel that takes calls, so that it can be told from one that is gone or cut
    off. Takes up to `PROBE_S` seconds.
    """
    peer: int | None = None
    if keeper is None:
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeper, peer = ("the launcher", None) if hosted else ("rank 0", 0)
    place = _torch_private.store_place(store)
    if place is None:
        return PeerError(f"{keeper}, which keeps the store, did not answer for {seconds:g} s.", peer=peer)
    where = f"which keeps the store at {place[0]}:{place[1]}"
    try:
        socket.create_connection(place, timeout=PROBE_S).close()
    except ConnectionError:
        ended = "is gone: nobody listens there any more. It has ended, or has given up waiting for this rank."
        return PeerError(f"{keeper}, {where}, {ended}", peer=peer, candidates=() if peer is None else (peer, rank))
    except OSError:
        return PeerError(
            f"rank {rank} cannot reach {keeper}, {where}; one of the two is cut off from the network.",
            peer=peer,
            candidates=(rank,) if peer is None else (peer, rank),
        )
    what = f"did not answer for {seconds:g} s; its process is stopped or hangs."
    return PeerError(f"{keeper}, {where}, {what}", peer=peer)
