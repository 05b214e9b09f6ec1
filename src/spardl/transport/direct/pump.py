"""Several connections at once: whatever can be sent or received is, until all messages of a round are complete."""

import select
from collections.abc import Callable, Iterable
from time import monotonic

from spardl.transport.direct.link import Link, Silent

LONGEST_POLL_MS = (1 << 31) - 1


# A byte a second is no progress. Each so many bytes that move buy one more second, so a round takes at most its timeout
# and what its messages take at this rate: 8 kbit/s.
BYTES_PER_SECOND = 1024


class Pace:
    """Until when the next byte must move. `away` says for how many seconds this process did not run since a time."""

    def __init__(self, started: float, timeout: float, away: Callable[[float], float]) -> None:
        self.deadline = started + timeout
        self.timeout = timeout
        self._started = started
        self._away = away
        self._excused = 0.0

    def moved(self, count: int, now: float) -> None:
        self.deadline = min(now + self.timeout, self.deadline + count / BYTES_PER_SECOND)

    def is_over(self, now: float) -> bool:
        """Whether it is too late. Time in which this process was stopped is nobody else's fault."""
        if now < self.deadline:
            return False
        away = self._away(self._started)
        self.deadline += away - self._excused
        self._excused = away
        return now >= self.deadline


def finish(links: Iterable[Link], pace: Pace) -> float:
    """Move what can be moved until nothing is left; for how many seconds there was nothing to move.

    Raises `Silent` when it takes longer than `pace` allows.
    """
    pending = {link.fd: link for link in links if link.wants}
    poller = select.poll()
    wanted = {fd: link.wants for fd, link in pending.items()}
    for fd, events in wanted.items():
        poller.register(fd, events)
    waited, now, moved = 0.0, monotonic(), 0
    while pending:
        moving = any(link.moving for link in pending.values())
        before = now
        ready = poller.poll(min(LONGEST_POLL_MS, 1000 * max(0.0, pace.deadline - now)))
        now = monotonic()
        if not moving:
            waited += now - before
        if now >= pace.deadline and (moved or not ready) and pace.is_over(now):
            raise _silence(pending, pace.timeout)
        for fd, events in ready:
            link = pending[fd]
            before_it = link.moved
            if link.expecting and events & ~select.POLLOUT:
                link.pull()
            if link.unsent and events & ~select.POLLIN:
                link.push()
            moved += link.moved - before_it
            pace.moved(link.moved - before_it, now)
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
    late = [link for link in pending.values() if link.expecting] or list(pending.values())
    link = next((link for link in late if not link.moving), late[0])
    did = "sent" if link.expecting else "took"
    how = "no more than a few bytes" if link.started else "nothing"
    return Silent(f"{did} {how} for {timeout:g} s", link.peer, tuple(each.peer for each in late))
