"""What the network is: hosts, links, and paths between them.

The path from one host to another is a fixed sequence of links. A link goes one way, carries `rate` bytes per second and
is `latency` seconds long. How messages share links is said in `flows.py`; a topology is a subclass of `Network`.

A link that loses a share p of its packets is modelled by two effects, both as expectations, so that a simulation stays
a function of its settings: what was lost is sent again, so 1 - p of the rate is left; and a message of n packets, of
which at least one is lost with probability 1 - (1 - p)^n, waits so many round trips of its path longer. Congestion
control is not modelled.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from spardl.errors import ConfigError

PACKET = 1448  # bytes of a message that an Ethernet frame carries over TCP


@dataclass(frozen=True, eq=False, slots=True)
class Link:
    """One direction of a cable: bytes per second, seconds, and the share of packets lost. No link equals another."""

    rate: float = math.inf
    latency: float = 0.0
    name: str = "a link"
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"a link of {self.rate} bytes per second carries nothing; give more than 0, or inf.")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"a latency of {self.latency} seconds cannot be simulated; give 0 or more.")
        if not 0 <= self.loss < 1:
            raise ConfigError(f"a link that loses {self.loss} of its packets delivers nothing; give 0 to below 1.")

    @property
    def goodput(self) -> float:
        """Bytes per second that arrive, what is sent again not counted."""
        return self.rate * (1 - self.loss)


Path = tuple[Link, ...]


class Network(ABC):
    """`workers` hosts and the paths between them. A topology is a subclass; `flows.py` does the rest."""

    workers: int

    @property
    def name(self) -> str:
        """What people call it."""
        return type(self).__name__.lower()

    @abstractmethod
    def path(self, source: int, target: int) -> Path:
        """The links from one host to another: at least one, and the same ones each time."""

    def links(self) -> Sequence[Link]:
        """All links, each once. Those of all paths, unless a topology knows a shorter way to say it."""
        hosts = range(self.workers)
        return list(dict.fromkeys(link for a in hosts for b in hosts if a != b for link in self.path(a, b)))

    @staticmethod
    def switch(workers: int, *, latency: float = 0.0, bandwidth: float = math.inf) -> "Network":
        """Hosts on one switch that is never the bottleneck, each with a full-duplex link of `bandwidth` bytes/s.

        `latency` is that of a message from host to host.
        """
        from spardl.simulator.topologies import Switch

        return Switch(workers, latency, bandwidth)


def travel_time(path: Path, size: float) -> float:
    """Seconds that a message's last byte takes along a path, beside its transmission: latencies, and what was lost."""
    latency = sum(link.latency for link in path)
    kept = math.prod(1 - link.loss for link in path)
    if kept == 1.0:
        return latency
    return latency + 2 * latency * (1 - kept ** math.ceil(size / PACKET))


@dataclass(frozen=True)
class Change:
    """Links by the pattern of their names, and what becomes of them.

    slower  their rate is divided by this
    longer  seconds of latency on top
    loss    share of packets lost
    """

    pattern: str
    slower: float = 1.0
    longer: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.slower < math.inf:
            raise ConfigError(f"a link cannot become {self.slower} times slower; give a positive number.")

    def apply(self, link: Link) -> Link:
        if not fnmatchcase(link.name, self.pattern):
            return link
        return replace(
            link, rate=link.rate / self.slower, latency=link.latency + self.longer, loss=max(link.loss, self.loss)
        )


class Changed(Network):
    """Another network, some of whose links are slower, longer or lossy."""

    def __init__(self, network: Network, changes: Iterable[Change]) -> None:
        self.workers = network.workers
        self._network = network
        self._now = {id(link): link for link in network.links()}
        for change in changes:
            found = {key: change.apply(link) for key, link in self._now.items()}
            if all(found[key] is link for key, link in self._now.items()):
                raise ConfigError(
                    f"no link is called {change.pattern!r}; this network has {_some_names(network.links())}."
                )
            self._now = found

    @property
    def name(self) -> str:
        return self._network.name

    def path(self, source: int, target: int) -> Path:
        return tuple(self._now[id(link)] for link in self._network.path(source, target))

    def links(self) -> Sequence[Link]:
        return [self._now[id(link)] for link in self._network.links()]


def _some_names(links: Sequence[Link]) -> str:
    names = [repr(link.name) for link in links]
    return ", ".join(names) if len(names) <= 6 else ", ".join([*names[:5], "...", names[-1]])
