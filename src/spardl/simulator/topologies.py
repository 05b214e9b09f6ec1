"""Topologies: who is connected with whom, and which way messages go.

Each host has a line of its own, up and down, to a switch, or to its neighbours where there is no switch. `latency` is
that of the line up, so on one switch it is that of a message from host to host; links between switches, and between
neighbours, have one each. Routes are fixed.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spardl.errors import ConfigError
from spardl.simulator.network import Link, Network, Path


@dataclass(frozen=True)
class Lines(Network):
    """Hosts with a line each, which carries `bandwidth` bytes/s up, and `down` bytes/s down if that differs."""

    workers: int
    latency: float = 0.0
    bandwidth: float = math.inf
    down: float | None = None

    def __post_init__(self) -> None:
        Link(self.bandwidth, self.latency)  # refuses what cannot be, before anything is sent
        Link(self._rate_down)

    @property
    def _rate_down(self) -> float:
        return self.bandwidth if self.down is None else self.down

    @cached_property
    def _up(self) -> list[Link]:
        return [Link(self.bandwidth, self.latency, f"worker {host} up") for host in range(self.workers)]

    @cached_property
    def _down(self) -> list[Link]:
        return [Link(self._rate_down, 0.0, f"worker {host} down") for host in range(self.workers)]

    def links(self) -> Sequence[Link]:
        return [*self._up, *self._down, *self._between.values()]

    @cached_property
    def _between(self) -> Mapping[tuple[object, ...], Link]:
        """Links between switches, by a key of the topology's own."""
        return {}

    def path(self, source: int, target: int) -> Path:
        return (self._up[source], *self._way(source, target), self._down[target])

    def _way(self, source: int, target: int) -> Path:
        """What lies between the lines of two hosts."""
        return ()


@dataclass(frozen=True)
class Switch(Lines):
    """One switch, which is never the bottleneck."""


@dataclass(frozen=True)
class FatTree(Lines):
    """Racks of `rack` hosts, whose switches hang on a core that is never the bottleneck.

    A rack's line to the core carries `rack * bandwidth / oversubscription`: with 1, all of its hosts can send at their
    full rate to other racks; usual are 2 to 8.
    """

    rack: int = 32
    oversubscription: float = 4.0
    core_latency: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rack < 1:
            raise ConfigError(f"a rack of {self.rack} hosts holds nobody; give 1 or more.")
        if not 0 < self.oversubscription < math.inf:
            raise ConfigError(f"a core cannot be oversubscribed {self.oversubscription} times; give a positive number.")

    @property
    def name(self) -> str:
        return "fat-tree"

    @cached_property
    def _between(self) -> Mapping[tuple[object, ...], Link]:
        racks = range(-(-self.workers // self.rack))
        up = self.rack * self.bandwidth / self.oversubscription
        down = self.rack * self._rate_down / self.oversubscription
        found: dict[tuple[object, ...], Link] = {
            ("up", rack): Link(up, self.core_latency, f"rack {rack} up") for rack in racks
        }
        return found | {("down", rack): Link(down, self.core_latency, f"rack {rack} down") for rack in racks}

    def _way(self, source: int, target: int) -> Path:
        here, there = source // self.rack, target // self.rack
        return () if here == there else (self._between["up", here], self._between["down", there])


@dataclass(frozen=True)
class FlattenedButterfly(Lines):
    """Switches of `rack` hosts in a grid; each is connected with all others of its row and of its column.

    Kim, Dally and Abts, "Flattened butterfly: a cost-efficient topology for high-radix networks", ISCA 2007. Links
    between switches carry `bandwidth` times `trunk`. Messages go along the row first, then along the column: two links
    between switches at most, whatever the size.
    """

    rack: int = 8
    trunk: float = 1.0
    core_latency: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rack < 1:
            raise ConfigError(f"a switch of {self.rack} hosts holds nobody; give 1 or more.")
        if not 0 < self.trunk < math.inf:
            raise ConfigError(f"links between switches of {self.trunk} times a line carry nothing; give more than 0.")

    @property
    def name(self) -> str:
        return "flattened-butterfly"

    @cached_property
    def _side(self) -> int:
        switches = -(-self.workers // self.rack)
        return math.isqrt(max(0, switches - 1)) + 1

    @cached_property
    def _between(self) -> Mapping[tuple[object, ...], Link]:
        found: dict[tuple[object, ...], Link] = {}
        for first, second in itertools.product(range(self._side**2), repeat=2):
            row, column = divmod(first, self._side)
            if first != second and (second // self._side == row) != (second % self._side == column):
                name = f"switch {first} > {second}"
                found[first, second] = Link(self.trunk * self.bandwidth, self.core_latency, name)
        return found

    def _way(self, source: int, target: int) -> Path:
        here, there = source // self.rack, target // self.rack
        corner = here // self._side * self._side + there % self._side
        steps = itertools.pairwise(dict.fromkeys((here, corner, there)))
        return tuple(self._between[step] for step in steps)


@dataclass(frozen=True)
class Ring(Lines):
    """Each host has a link to the next one and to the one before; messages go the shorter way."""

    @cached_property
    def _between(self) -> Mapping[tuple[object, ...], Link]:
        found: dict[tuple[object, ...], Link] = {}
        for host in range(self.workers):
            for other in sorted({(host + 1) % self.workers, (host - 1) % self.workers} - {host}):
                found[host, other] = Link(self.bandwidth, self.latency, f"worker {host} > {other}")
        return found

    def links(self) -> Sequence[Link]:
        return [*self._between.values()]

    def path(self, source: int, target: int) -> Path:
        return tuple(self._between[step] for step in itertools.pairwise(_round(source, target, self.workers)))


def _round(source: int, target: int, size: int) -> list[int]:
    """The stops from one place of a ring to another, the shorter way; forward, if both are as short."""
    forward = (target - source) % size
    step, count = (1, forward) if 2 * forward <= size else (-1, size - forward)
    return [(source + step * stop) % size for stop in range(count + 1)]


@dataclass(frozen=True)
class Torus(Ring):
    """A grid of hosts, as square as their number allows, that closes on both sides; along the row, then the column."""

    @cached_property
    def columns(self) -> int:
        return next(width for width in range(math.isqrt(self.workers), 0, -1) if self.workers % width == 0)

    @cached_property
    def _between(self) -> Mapping[tuple[object, ...], Link]:
        found: dict[tuple[object, ...], Link] = {}
        rows, columns = self.workers // self.columns, self.columns
        for host in range(self.workers):
            row, column = divmod(host, columns)
            along = {row * columns + (column + step) % columns for step in (1, -1)}
            across = {(row + step) % rows * columns + column for step in (1, -1)}
            for other in sorted((along | across) - {host}):
                found[host, other] = Link(self.bandwidth, self.latency, f"worker {host} > {other}")
        return found

    def path(self, source: int, target: int) -> Path:
        (row, column), (to_row, to_column) = divmod(source, self.columns), divmod(target, self.columns)
        along = [row * self.columns + stop for stop in _round(column, to_column, self.columns)]
        rows = self.workers // self.columns
        across = [stop * self.columns + to_column for stop in _round(row, to_row, rows)]
        return tuple(self._between[step] for step in itertools.pairwise([*along, *across[1:]]))


@dataclass(frozen=True)
class Regions(Lines):
    """Equal regions, each on a switch of its own, every two of them joined by a line of `wan_bandwidth` each way."""

    regions: int = 2
    wan_bandwidth: float = math.inf
    wan_latency: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.regions <= self.workers:
            raise ConfigError(f"{self.workers} workers cannot be spread over {self.regions} regions; give fewer.")

    def region(self, host: int) -> int:
        """Which region a host is in; the first ones have one more where they cannot be equal."""
        return host * self.regions // self.workers

    @cached_property
    def _between(self) -> Mapping[tuple[object, ...], Link]:
        return {
            (a, b): Link(self.wan_bandwidth, self.wan_latency, f"region {a} > {b}")
            for a, b in itertools.permutations(range(self.regions), 2)
        }

    def _way(self, source: int, target: int) -> Path:
        here, there = self.region(source), self.region(target)
        return () if here == there else (self._between[here, there],)
