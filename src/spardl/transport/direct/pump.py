"""Several connections at once: whatever can be sent or received is, until all messages of a round are complete."""

import select
from collections.abc import Iterable
from time import perf_counter

from spardl.transport.direct.link import Link, Silent

LONGEST_POLL_MS = (1 << 31) - 1


def finish(links: Iterable[Link], progress: float, timeout: float) -> float:
    """Move what can be moved until nothing is left; for how many seconds there was nothing to move.

    `progress` is when something last moved. Raises `Silent` when nothing has moved for `timeout` seconds.
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
        ready = poller.poll(min(LONGEST_POLL_MS, 1000 * max(0.0, progress + timeout - now)))
        now = perf_counter()
        if not moving:
            waited += now - before
        if not ready and now >= progress + timeout:
            raise _silence(pending, timeout)
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


def _silence(pending: dict[int, Link], timeout: float) -> Silent:
    """Whom to blame when nothing moves: a peer that should have sent, or else one that should have taken."""
    link = next((link for link in pending.values() if link.expecting), next(iter(pending.values())))
    return Silent(f"{'sent' if link.expecting else 'took'} nothing for {timeout:g} s", link.peer)
