"""Teams are placed by the network: of ranks that are close, and as many as cost least on the lines between them."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.collectives.teams import best_teams, bytes_sent, rounds
from spardl.config import SyncConfig
from spardl.planning.candidates import by_teams
from spardl.planning.links import Links
from spardl.planning.placing import Placement, by_nearness, placements, seconds
from spardl.simulator.simulation import simulate
from spardl.simulator.topologies import Regions

NEAR, FAR = 1e-4, 0.02


def clustered(cluster_of: list[int], far_rate: float = 1e6) -> Links:
    """Ranks of the clusters named; between two clusters lines are long and thin."""
    ranks = range(len(cluster_of))

    def square(inside: float, outside: float) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(None if a == b else inside if cluster_of[a] == cluster_of[b] else outside for b in ranks)
            for a in ranks
        )

    return Links(square(NEAR, FAR), square(1e8, far_rate))


@given(
    workers=st.sampled_from([2, 4, 6, 8, 12, 16, 24]),
    latency=st.sampled_from([0.0, 1e-5, 1e-3, 0.1]),
    rate=st.sampled_from([1e5, 1e7, 1e10]),
    entries=st.integers(1, 10**6),
    density=st.sampled_from([0.1, 0.01, 0.001]),
)
def test_where_all_lines_are_alike_it_is_the_rule_of_teams(workers, latency, rate, entries, density):
    links = Links.uniform(workers, latency=latency, rate=rate)
    price = {"per_round": latency, "per_byte": 1 / rate}
    first = placements(links, entries, density)[0]
    best = Placement(best_teams(workers, entries, density, **price), first.order)
    assert seconds(links, first, entries, density) == pytest.approx(seconds(links, best, entries, density))
    expected = rounds(workers, first.teams) * latency + bytes_sent(workers, first.teams, entries, density) / rate
    assert seconds(links, first, entries, density) == pytest.approx(expected)


@given(cluster_of=st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_ranks_of_a_cluster_stand_side_by_side(cluster_of):
    order = by_nearness(clustered(cluster_of))
    assert sorted(order) == list(range(len(cluster_of)))
    met = [cluster_of[rank] for rank in order]
    assert len(list(itertools.groupby(met))) == len(set(met))


@given(st.permutations([0, 0, 0, 0, 1, 1, 1, 1]), st.integers(10, 10**6))
def test_no_number_of_teams_in_any_order_of_numbers_is_cheaper(cluster_of, entries):
    """Than the first that is placed by nearness."""
    links = clustered(cluster_of)
    first = placements(links, entries, 0.01)[0]
    numbered = placements(links, entries, 0.01, tuple(range(8)))
    assert all(
        seconds(links, first, entries, 0.01) <= seconds(links, each, entries, 0.01) * (1 + 1e-9) for each in numbered
    )


def test_what_was_given_counts():
    links = clustered([0, 1, 0, 1])
    assert by_teams(SyncConfig(), links, 10**6)[0].options.order == (0, 2, 1, 3)
    assert by_teams(SyncConfig(order=(3, 2, 1, 0)), links, 10**6)[0].options.order == (3, 2, 1, 0)
    assert [each.options.order for each in by_teams(SyncConfig(teams=2), links, 10**6)] == ["numbered"]


def test_lines_nobody_has_looked_at_count_as_the_usual_one():
    unknown = Links(((None, 0.1, None, None),) * 4, ((None, 1e6, None, None),) * 4)
    assert seconds(unknown, Placement(2, (2, 3, 1, 0)), 1000, 0.01) > 0


def test_on_simulated_regions_the_placed_teams_are_quicker_than_numbered_ones():
    """Ranks that alternate between two regions: what the rule says of them, the simulator finds."""
    network = Regions(8, latency=NEAR / 2, bandwidth=1e8, regions=2, wan_latency=FAR, wan_bandwidth=1e6)
    host_of = [0, 4, 1, 5, 2, 6, 3, 7]  # of each rank: the simulator's regions are 0 to 3 and 4 to 7
    placed = by_teams(SyncConfig(), clustered([0, 1] * 4), 100_000)[0].options

    def simulated(order: Sequence[int]) -> float:
        hosts = tuple(host_of[rank] for rank in order)
        return simulate(workers=8, elements=100_000, network=network, teams=placed.teams, order=hosts).time_s

    assert simulated(placed.order) < 0.8 * simulated(range(8))
