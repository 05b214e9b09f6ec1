"""Topologies: every pair is connected by the links that it should be."""

import itertools
import math

import pytest

from spardl.errors import ConfigError
from spardl.simulator.graph import Cable, Graph
from spardl.simulator.topologies import FatTree, FlattenedButterfly, Regions, Ring, Switch, Torus

TOPOLOGIES = [
    Switch(7, 1e-3, 100.0),
    FatTree(10, 1e-3, 100.0, rack=4),
    FlattenedButterfly(29, 1e-3, 100.0, rack=3),
    Ring(7, 1e-3, 100.0),
    Ring(1, 1e-3, 100.0),
    Torus(12, 1e-3, 100.0),
    Torus(7, 1e-3, 100.0),
    Regions(7, 1e-3, 100.0, regions=3, wan_bandwidth=10.0, wan_latency=0.1),
]


def names(network, source, target):
    return [link.name for link in network.path(source, target)]


@pytest.mark.parametrize("network", TOPOLOGIES, ids=repr)
def test_every_pair_has_a_path_of_known_links_and_takes_the_same_one_each_time(network):
    known = set(network.links())
    assert len(known) == len(network.links())
    for source, target in itertools.permutations(range(network.workers), 2):
        path = network.path(source, target)
        assert path and known.issuperset(path) and len(set(path)) == len(path)
        assert network.path(source, target) == path


def test_lines_up_and_down_may_differ():
    up, down = Switch(2, 0.0, 100.0, 900.0).path(0, 1)
    assert (up.rate, down.rate) == (100, 900)


def test_a_fat_tree_leads_over_the_core_between_racks_only():
    network = FatTree(8, 1e-3, 100.0, rack=4, oversubscription=2)
    assert names(network, 0, 3) == ["worker 0 up", "worker 3 down"]
    assert names(network, 0, 4) == ["worker 0 up", "rack 0 up", "rack 1 down", "worker 4 down"]
    assert network.path(0, 4)[1].rate == 4 * 100 / 2


def test_a_flattened_butterfly_needs_two_links_between_switches_at_most():
    """Nine switches of two hosts, three by three: along the row to the corner, then along the column."""
    network = FlattenedButterfly(18, 1e-3, 100.0, rack=2)
    assert names(network, 0, 1) == ["worker 0 up", "worker 1 down"]
    assert names(network, 0, 5) == ["worker 0 up", "switch 0 > 2", "worker 5 down"]
    assert names(network, 0, 12) == ["worker 0 up", "switch 0 > 6", "worker 12 down"]
    assert names(network, 0, 16) == ["worker 0 up", "switch 0 > 2", "switch 2 > 8", "worker 16 down"]


def test_a_ring_goes_the_shorter_way():
    network = Ring(6, 1e-3, 100.0)
    assert names(network, 5, 1) == ["worker 5 > 0", "worker 0 > 1"]
    assert names(network, 1, 5) == ["worker 1 > 0", "worker 0 > 5"]
    assert len(network.path(0, 3)) == 3


def test_a_torus_goes_along_the_row_and_then_along_the_column():
    network = Torus(16, 1e-3, 100.0)
    assert names(network, 0, 7) == ["worker 0 > 3", "worker 3 > 7"]
    assert max(len(network.path(0, other)) for other in range(1, 16)) == 4


def test_regions_are_joined_by_lines_between_every_two():
    network = Regions(6, 1e-3, 100.0, regions=3, wan_bandwidth=10.0, wan_latency=0.1)
    assert names(network, 0, 1) == ["worker 0 up", "worker 1 down"]
    assert names(network, 1, 5) == ["worker 1 up", "region 0 > 2", "worker 5 down"]
    assert sum(link.latency for link in network.path(1, 5)) == pytest.approx(0.101)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FatTree(4, rack=0),
        lambda: FatTree(4, oversubscription=0),
        lambda: FlattenedButterfly(4, rack=0),
        lambda: FlattenedButterfly(4, trunk=math.inf),
        lambda: Regions(4, regions=5),
        lambda: Regions(4, regions=0),
        lambda: Switch(4, 0.0, 1.0, -1.0),
    ],
)
def test_a_topology_that_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_a_graph_takes_the_way_with_the_least_latency_and_then_the_fewest_links():
    cables = [
        Cable("worker 0", "a", latency=0.2),
        Cable("a", "worker 1", latency=0.2),
        Cable("worker 0", "b", latency=0.1, rate=10.0, back=20.0),
        Cable("b", "worker 1", latency=0.1),
        Cable("worker 0", "c", latency=0.1),
        Cable("c", "d"),
        Cable("d", "worker 1", latency=0.1),
    ]
    network = Graph(2, cables)
    assert names(network, 0, 1) == ["worker 0 > b", "b > worker 1"]
    assert [link.rate for link in network.path(1, 0)] == [math.inf, 20.0]


def test_a_graph_that_does_not_connect_everyone_is_refused():
    with pytest.raises(ConfigError, match=r"does not connect everyone: .* no way to worker 2"):
        Graph(3, [Cable("worker 0", "worker 1")])
