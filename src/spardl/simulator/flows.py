"""How messages share links: as flows, with max-min fair rates, in virtual time.

The model, for every topology:

1. From the moment it is sent until its last byte is through, a message is a flow: it uses all links of its path at
   once, at one rate. At any moment the rates are max-min fair (`fair.py`), as those of long TCP connections roughly
   are: they rise together until a link is full.
2. Rates change when a flow begins or ends, at that moment, everywhere.
3. The last byte arrives the path's latencies after it was sent, later where packets are lost (`network.py`).
4. The messages of a round begin together. The round ends when their last bytes are through, and when all expected
   messages have come.
5. A host accepts messages before it waits for them.

So a message that has its links to itself takes size / (rate of the slowest link) + (sum of latencies) seconds, and n
equal messages that begin together on one link take n times as long, and end together.

Example: on a switch of 100 bytes/s and 1 s of latency, ranks 1 and 2 each send 100 bytes to rank 0 at 0 s. Each gets 50
bytes/s of rank 0's line: they have sent at 2 s, and both messages have come at 3 s.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spardl.simulator import fair
from spardl.simulator.clock import Clock
from spardl.simulator.network import Link, Path

AFTER_ALL = 1 << 60  # in the order of ranks at one moment: rates are settled when everybody has sent what he sends now
TOGETHER = 1e-12  # flows whose ends differ by less than this share of what is left end together

Done = Callable[[], object]


class Flows:
    """All messages that are under way. Costs the hops of all of them whenever one begins or ends."""

    def __init__(self, clock: Clock) -> None:
        self.carried: dict[Link, float] = {}  # bytes so far
        self._clock = clock
        self._links: dict[int, int] = {}
        self._capacity = np.empty(0)
        self._paths = np.empty((0, 1), np.int32)
        self._hops = np.empty(0, np.int32)
        self._remaining, self._rates = np.empty(0), np.empty(0)
        self._done: list[Done | None] = []
        self._free: list[int] = []
        self._under_way: list[int] = []
        self._active = np.empty(0, np.int32)
        self._since = 0.0  # until when flows have been advanced
        self._settling = False
        self._edition = 0  # of the rates; an end that was foreseen under older ones does not count

    def start(self, now: float, path: Path, size: float, done: Done) -> None:
        """Send `size` bytes along a path from `now` on, the clock's present; `done` is called when they are through."""
        for link in path:
            self.carried[link] = self.carried.get(link, 0.0) + size
        limits = [link for link in path if link.rate < math.inf]
        if not limits or not size:
            self._clock.at(now, 0, lambda *_: done(), None)
            return
        slot = self._slot(len(limits))
        self._hops[slot] = len(limits)
        self._paths[slot, : len(limits)] = [self._number(link) for link in limits]
        self._remaining[slot], self._rates[slot] = size, 0.0
        self._done[slot] = done
        self._advance(now)
        self._under_way.append(slot)
        self._settle_later(now)

    def _number(self, link: Link) -> int:
        number = self._links.setdefault(id(link), len(self._links))
        if number >= len(self._capacity):
            self._capacity = np.append(self._capacity, np.zeros(max(64, number)))
        self._capacity[number] = link.goodput
        return number

    def _slot(self, hops: int) -> int:
        """Room for one more flow of so many hops."""
        if hops > self._paths.shape[1]:
            wider = np.zeros((len(self._paths), 2 * hops), np.int32)
            wider[:, : self._paths.shape[1]] = self._paths
            self._paths = wider
        if not self._free:
            before = len(self._hops)
            more = max(64, before)
            self._paths = np.concatenate([self._paths, np.zeros((more, self._paths.shape[1]), np.int32)])
            self._hops = np.append(self._hops, np.zeros(more, np.int32))
            self._remaining = np.append(self._remaining, np.zeros(more))
            self._rates = np.append(self._rates, np.zeros(more))
            self._done += [None] * more
            self._free = list(range(before + more - 1, before - 1, -1))
        return self._free.pop()

    def _advance(self, now: float) -> None:
        if now > self._since:
            fair.advance(self._active, self._remaining, self._rates, now - self._since)
        self._since = now

    def _settle_later(self, now: float) -> None:
        """Agree on rates once everything that begins or ends now has done so."""
        if not self._settling:
            self._settling = True
            self._clock.at(now, AFTER_ALL, self._settle, now)

    def _settle(self, _: int, now: float) -> None:
        self._settling = False
        self._active = np.array(self._under_way, np.int32)
        self._edition += 1
        if not self._under_way:
            return
        capacity = self._capacity[: len(self._links)]
        fair.share(self._paths, self._hops, self._active, capacity, self._rates)
        left = max(0.0, fair.first_done(self._active, self._remaining, self._rates))
        self._clock.at(now + left, AFTER_ALL - 1, self._end, (now + left, self._edition))

    def _end(self, _: int, when: Any) -> None:
        """Those that are through leave."""
        now, edition = when
        if edition != self._edition:
            return
        self._advance(now)
        seconds = self._remaining[self._active] / self._rates[self._active]
        through = self._active[seconds <= TOGETHER * max(now, 1e-9)].tolist()
        if not through:
            through = [int(self._active[np.argmin(seconds)])]
        gone = set(through)
        self._under_way = [slot for slot in self._under_way if slot not in gone]
        self._settle_later(now)
        for slot in through:
            done, self._done[slot] = self._done[slot], None
            self._free.append(slot)
            assert done is not None
            done()
