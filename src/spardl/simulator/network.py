"""What the network is: hosts, links, and how long messages take that share them.

The path from one host to another is a fixed sequence of links. A link goes one way, carries `rate` bytes per second and
is `latency` seconds long. The model, for every topology:

1. A link serves messages in the order in which their first bytes reach it (at the same time: the lower sender first),
   for size / rate seconds each. It remembers until when it is busy, between rounds and between runs too.
2. A first byte reaches the next link `latency` after the service begins (cut-through). A last byte leaves a link when
   the link has served the message and the last byte has come.
3. To a link that is faster than one before it, a message comes slower than it is served. Messages then pass side by
   side: a first byte does not wait, only the last byte does, if the link has more to serve than it can.
4. The messages of a round reach the first links of their paths when the round begins, in the order of the round's list.
   The round ends when their last bytes have left these links and when all expected messages have come.
5. A host accepts messages before it waits for them. Computing takes no time.

Example: on a switch of 100 bytes/s and 1 s of latency, ranks 1 and 2 each send 100 bytes to rank 0 at 0 s. Both have
sent by 1 s, when the first bytes reach rank 0's link; rank 1's message has come at 2 s, rank 2's at 3 s.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spardl.errors import ConfigError
from spardl.simulator.clock import Clock
from spardl.sparse import Array

NOTHING = np.empty(0, np.uint8)  # the content of a message of which only the time matters


@dataclass(frozen=True, eq=False, slots=True)
class Link:
    """One direction of a cable: `rate` in bytes per second, `latency` in seconds. No link equals another."""

    rate: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"a link of {self.rate} bytes per second carries nothing; give more than 0, or inf.")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"a latency of {self.latency} seconds cannot be simulated; give 0 or more.")


class Network(ABC):
    """`workers` hosts and the paths between them. A topology is a subclass; the model above does the rest."""

    workers: int

    @abstractmethod
    def path(self, source: int, target: int) -> tuple[Link, ...]:
        """The links from one host to another: at least one, and the same ones each time."""

    @staticmethod
    def switch(workers: int, *, latency: float = 0.0, bandwidth: float = math.inf) -> "Switch":
        """Hosts on one switch that is never the bottleneck, each with a full-duplex link of `bandwidth` bytes/s.

        `latency` is that of a message from host to host.
        """
        return Switch(workers, latency, bandwidth)


@dataclass(frozen=True)
class Switch(Network):
    workers: int
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        Link(self.bandwidth, self.latency)  # refuses what cannot be, before anything is sent

    def path(self, source: int, target: int) -> tuple[Link, ...]:
        return self._up[source], self._down[target]

    @cached_property
    def _up(self) -> list[Link]:
        return [Link(self.bandwidth, self.latency) for _ in range(self.workers)]

    @cached_property
    def _down(self) -> list[Link]:
        return [Link(self.bandwidth) for _ in range(self.workers)]


@dataclass(eq=False, slots=True)
class Transfer:
    """A message under way to link `hop` of its path, or from the last link to its target.

    Its first byte comes there at `head`, its last at `tail`. The slowest link so far serves it in `longest` seconds.
    """

    source: int
    target: int
    size: float
    frame: Array
    path: tuple[Link, ...]
    head: float
    tail: float
    longest: float = 0.0
    hop: int = 0


class Carrier:
    """Moves messages over a network's links by the model above. One event per message and link after the first.

    `busy` says until when each link is busy, and is kept up to date. `arrived` is called with each message as soon as
    nothing can change the time of its arrival, `tail`, which may lie in the future.
    """

    def __init__(
        self, network: Network, busy: dict[Link, float], clock: Clock, arrived: Callable[[Transfer], None]
    ) -> None:
        self.network = network
        self.busy = busy
        self.clock = clock
        self.arrived = arrived

    def send(self, now: float, source: int, target: int, size: float, frame: Array = NOTHING) -> float:
        """Take over a message at `now`, the clock's present; return when its last byte leaves the first link."""
        return self._enter(source, Transfer(source, target, size, frame, self.network.path(source, target), now, now))

    def _enter(self, source: int, message: Transfer) -> float:
        """Queue at the next link of the path; return when the last byte leaves it."""
        link = message.path[message.hop]
        service = message.size / link.rate
        begin = max(message.head, self.busy.get(link, 0.0))
        end, left = begin + service, message.tail
        if begin > message.head or service > message.longest:
            left = max(left, end)
        # Otherwise end <= left but for rounding, which must not make the link look busy.
        self.busy[link] = min(end, left)
        if service >= message.longest:
            message.head, message.longest = begin, service
        message.hop += 1
        message.head += link.latency
        message.tail = left + link.latency
        if message.hop < len(message.path):
            self.clock.at(message.head, source, self._enter, message)
        else:
            self.arrived(message)
        return left
