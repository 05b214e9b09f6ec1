"""What the lines between ranks let through: seconds of a message, bytes per second, and who is close to whom.

Collective: ranks pair up, send each other a few short messages and a long one, and gather what they saw, so that all of
them hold the same numbers. Few ranks try all pairs, many a sample: neighbours at distances 1, 2, 4 ... round the ring,
which connects them all.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spardl.agreement import gather_values
from spardl.collectives.program import Message, Round
from spardl.errors import ConfigError
from spardl.transport.base import Transport

ALL_PAIRS = 8  # workers, up to whom every pair is tried
PINGS = 6  # short messages, the first of which warms up
PING_BYTES = 8
FIRST_BYTES = 32 << 10  # of the long message, until it is known how long it may be
LONG_S = 0.04  # what a long message is to take
MOST_BYTES = 4 << 20
SHORTEST_S = 1e-6  # that a long message may seem to take: clocks are not finer
BULKS = 3  # long messages, the first of which warms up
APART = 4.0  # times the latency between two levels of nearness, and not just noise
LEAST_APART_S = 200e-6  # nor are two levels less than this apart: below, it is who shares a core with whom

Meeting = tuple[int, int]  # whom to send to, whom to receive from


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds and bytes per second from rank to rank; None where nobody looked."""

    latencies: tuple[tuple[float | None, ...], ...]
    rates: tuple[tuple[float | None, ...], ...]

    @classmethod
    def uniform(cls, workers: int, *, latency: float, rate: float) -> "Links":
        """The same line between any two."""
        if workers < 1 or not latency >= 0 or not rate > 0:
            raise ConfigError(f"{workers} workers with {latency} s and {rate} bytes per second are no network.")

        def square(value: float) -> tuple[tuple[float | None, ...], ...]:
            return tuple(tuple(None if a == b else value for b in range(workers)) for a in range(workers))

        return cls(square(latency), square(rate))

    @property
    def workers(self) -> int:
        return len(self.latencies)

    @property
    def latency(self) -> float:
        """Of the usual pair: the median."""
        known = [each for row in self.latencies for each in row if each is not None]
        return statistics.median(known) if known else 0.0

    @property
    def rate(self) -> float:
        """Of the slowest rank's usual line, which holds all others back."""
        rows = [[each for each in row if each is not None] for row in self.rates]
        return min((statistics.median(row) for row in rows if row), default=math.inf)

    def clusters(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that are close to each other, in rank order: racks, regions. One cluster where all are equally far."""
        limit = _nearness(sorted(each for row in self.latencies for each in row if each is not None))
        left, found = set(range(self.workers)), []
        while left:
            cluster, edge = set(), {min(left)}
            while edge:
                cluster |= edge
                edge = {b for a in edge for b in left - cluster if self._is_near(a, b, limit)}
            found.append(tuple(sorted(cluster)))
            left -= cluster
        return tuple(found)

    def _is_near(self, a: int, b: int, limit: float) -> bool:
        known = [each for each in (self.latencies[a][b], self.latencies[b][a]) if each is not None]
        return bool(known) and min(known) <= limit

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        rate = self.rate
        return {
            "latency_s": self.latency,
            "bytes_per_second": rate if math.isfinite(rate) else None,
            "clusters": [list(each) for each in self.clusters()],
        }


def _nearness(latencies: Sequence[float]) -> float:
    """Latencies up to this are near: below the widest gap, if there is a real one."""
    widest, limit = APART, math.inf
    for low, high in itertools.pairwise(latencies):
        ratio = high / low if low > 0 else math.inf
        if ratio >= widest and high - low >= LEAST_APART_S:
            widest, limit = ratio, low
    return limit


def meetings(workers: int, rank: int, *, all_pairs: bool) -> list[Meeting | None]:
    """Who this rank meets, round after round; None where it waits. All ranks have as many rounds.

    All pairs meet as in a tournament: one stays, the others move round by one. A sample meets round the ring.
    """
    if workers < 2:
        return []
    if not all_pairs:
        gaps = [1 << power for power in range((workers - 1).bit_length())]
        return [((rank + gap) % workers, (rank - gap) % workers) for gap in gaps]
    places = workers + workers % 2
    found: list[Meeting | None] = []
    for turn in range(places - 1):
        table = [places - 1, *((turn + place) % (places - 1) for place in range(places - 1))]
        other = table[places - 1 - table.index(rank)]
        found.append((other, other) if other < workers else None)
    return found


def probe(transport: Transport, *, all_pairs: bool | None = None) -> Links:
    """Measure the lines. Collective, between steps; some tenths of a second on lines of 10 Mbit/s and more."""
    workers, rank = transport.workers, transport.rank
    wanted = workers <= ALL_PAIRS if all_pairs is None else all_pairs
    rounds = meetings(workers, rank, all_pairs=wanted)
    latencies = _each(transport, rounds, lambda turn: _fastest(transport, turn, PING_BYTES, PINGS))
    short = _each(transport, rounds, lambda turn: _fastest(transport, turn, FIRST_BYTES, 2))
    slowest = max((each for row in short for each in row if each is not None), default=0.0)
    size = _long_message(slowest)
    times = _each(transport, rounds, lambda turn: _fastest(transport, turn, size, BULKS))
    rates = tuple(tuple(map(functools.partial(_rate, size), *rows)) for rows in zip(times, latencies, strict=True))
    return Links(latencies, rates)


def _rate(size: int, took: float | None, latency: float | None) -> float | None:
    return None if took is None or latency is None else size / max(took - latency, SHORTEST_S)


def _long_message(seconds: float) -> int:
    """Bytes that take `LONG_S`, where `FIRST_BYTES` took so many seconds."""
    wanted = FIRST_BYTES * LONG_S / seconds if seconds > 0 else MOST_BYTES
    return int(min(MOST_BYTES, max(FIRST_BYTES, wanted)))


def _each(
    transport: Transport, rounds: Sequence[Meeting | None], measure: Callable[[Meeting], float]
) -> tuple[tuple[float | None, ...], ...]:
    """What every rank measured to whom it met, as rows of a square. Collective."""
    mine: list[float | None] = [None] * transport.workers
    for meeting in rounds:
        if meeting is not None:
            mine[meeting[0]] = measure(meeting)
    return tuple(tuple(row) for row in gather_values(transport.gather_texts, mine))


def _fastest(transport: Transport, meeting: Meeting, size: int, count: int) -> float:
    """Seconds of the fastest of some exchanges of `size` bytes, the first of which does not count."""
    taken = []
    for operation in _exchanges(transport, meeting, size, count):
        started = time.perf_counter()
        transport.perform(operation)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def _exchanges(transport: Transport, meeting: Meeting, size: int, count: int) -> Iterator[Round]:
    to, source = meeting
    on_cpu = torch.device(transport.device).type == "cpu"
    frame: Any = np.zeros(size, np.uint8) if on_cpu else torch.zeros(size, dtype=torch.uint8, device=transport.device)
    for _ in range(count):
        yield Round([Message(to, frame, size)], [(source, size)], "probe of the links")
