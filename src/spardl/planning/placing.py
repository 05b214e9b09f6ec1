"""Placing: how many teams SparDL forms, and of which ranks, where the lines between them are known.

Ranks that are close to each other stand side by side, so that teams are formed of them: within its team a rank sends
almost twice its entries, and between teams log2 d times one m-th of them. The number of teams is priced as in
`collectives.teams`, message by message, by the lines that each message takes.
"""

from collections.abc import Iterable
from typing import NamedTuple

from spardl.choices import is_power_of_two
from spardl.collectives.teams import bytes_between, bytes_within, team_counts
from spardl.planning.links import Links

Pair = tuple[int, int]


class Placement(NamedTuple):
    """So many teams, of ranks that follow one another in this order."""

    teams: int
    order: tuple[int, ...]


def by_nearness(links: Links) -> tuple[int, ...]:
    """All ranks, those of one cluster side by side."""
    return tuple(rank for cluster in links.clusters() for rank in cluster)


def placements(links: Links, entries: int, density: float, order: tuple[int, ...] | None = None) -> list[Placement]:
    """Every power of two of teams in this order, or by nearness, the quickest first; of equals two teams before others.

    Powers of two only, as in `best_teams`: other numbers select otherwise.
    """
    ranks = by_nearness(links) if order is None else order
    found = [Placement(count, ranks) for count in team_counts(links.workers) if is_power_of_two(count)]
    found.sort(key=lambda each: (each.teams != 2, each.teams))
    return sorted(found, key=lambda each: seconds(links, each, entries, density))


def seconds(links: Links, placement: Placement, entries: int, density: float) -> float:
    """What the messages of a step take, each on the slowest of the lines that ranks send it on."""
    workers, (teams, order) = links.workers, placement
    size = workers // teams
    total = 0.0
    if size > 1:
        latency, rate = _slowest(links, _inside(order, size))
        total += 2 * (size - 1).bit_length() * latency + bytes_within(workers, teams, entries, density) / rate
    gap = 1
    while gap < teams:
        latency, rate = _slowest(links, _across(order, size, gap))
        total += latency + bytes_between(workers, teams, entries, density) / rate
        gap *= 2
    return total


def _inside(order: tuple[int, ...], size: int) -> Iterable[Pair]:
    """Pairs of one team."""
    for first in range(0, len(order), size):
        team = order[first : first + size]
        yield from ((a, b) for a in team for b in team if a != b)


def _across(order: tuple[int, ...], size: int, gap: int) -> Iterable[Pair]:
    """Pairs at the same position of teams that are so far apart in recursive doubling."""
    for place, rank in enumerate(order):
        team, position = divmod(place, size)
        yield rank, order[(team ^ gap) * size + position]


def _slowest(links: Links, pairs: Iterable[Pair]) -> tuple[float, float]:
    """The longest latency and the lowest rate of these; where nobody has looked, those of the usual line."""
    known = [(links.latencies[a][b], links.rates[a][b]) for a, b in pairs]
    latencies = [latency for latency, _ in known if latency is not None]
    rates = [rate for _, rate in known if rate is not None]
    return max(latencies, default=links.latency), min(rates, default=links.rate)
