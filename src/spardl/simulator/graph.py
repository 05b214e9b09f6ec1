"""A network given as cables between named nodes, in which messages take the shortest way."""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from spardl.errors import ConfigError
from spardl.simulator.network import Link, Network, Path


@dataclass(frozen=True)
class Cable:
    """Two nodes and what lies between them: bytes per second there and back, seconds, and the share of packets lost."""

    first: str
    second: str
    rate: float = math.inf
    back: float | None = None
    latency: float = 0.0
    loss: float = 0.0

    def links(self) -> list[tuple[str, str, Link]]:
        """Both directions."""
        back = self.rate if self.back is None else self.back
        return [
            (self.first, self.second, Link(self.rate, self.latency, f"{self.first} > {self.second}", self.loss)),
            (self.second, self.first, Link(back, self.latency, f"{self.second} > {self.first}", self.loss)),
        ]


def worker_name(rank: int) -> str:
    """What the node of a rank is called."""
    return f"worker {rank}"


class Graph(Network):
    """Workers are the nodes "worker 0", "worker 1", ...; all others only pass messages on.

    The way with the least latency counts, of several the one with the fewest links, then the first in the file. Finding
    the ways from one worker costs a search over all links, once.
    """

    def __init__(self, workers: int, cables: Sequence[Cable]) -> None:
        self.workers = workers
        self._links = [link for cable in cables for link in cable.links()]
        self._out: dict[str, list[tuple[str, Link]]] = {}
        for source, target, link in self._links:
            self._out.setdefault(source, []).append((target, link))
        self._before: dict[int, dict[str, tuple[str, Link]]] = {}
        self._check()

    def _check(self) -> None:
        reached = set(self._ways(0)) | {worker_name(0)}
        missing = [rank for rank in range(self.workers) if worker_name(rank) not in reached]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ConfigError(
                f"this topology does not connect everyone: from worker 0 there is no way to worker {shown}; add links."
            )

    def links(self) -> Sequence[Link]:
        return [link for _, _, link in self._links]

    def path(self, source: int, target: int) -> Path:
        ways, here = self._ways(source), worker_name(target)
        found: list[Link] = []
        while here != worker_name(source):
            here, link = ways[here]
            found.append(link)
        return tuple(reversed(found))

    def _ways(self, source: int) -> dict[str, tuple[str, Link]]:
        """For each node that can be reached, the node before it on the way from `source`, and the link from there."""
        if source in self._before:
            return self._before[source]
        before: dict[str, tuple[str, Link]] = {}
        done: set[str] = set()
        order = itertools.count()
        nearest: list[tuple[float, int, int, str, tuple[str, Link] | None]] = [
            (0.0, 0, next(order), worker_name(source), None)
        ]
        while nearest:
            latency, hops, _, here, came = heapq.heappop(nearest)
            if here in done:
                continue
            done.add(here)
            if came is not None:
                before[here] = came
            for there, link in self._out.get(here, []):
                if there not in done:
                    heapq.heappush(nearest, (latency + link.latency, hops + 1, next(order), there, (here, link)))
        self._before[source] = before
        return before
