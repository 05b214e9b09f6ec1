"""Links: how long messages take that have them to themselves, and how they share them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.errors import ConfigError
from spardl.simulator.clock import Clock
from spardl.simulator.network import Carrier, Link, Network

examples = settings(deadline=None)


class Routes(Network):
    """Any paths, given as a dictionary."""

    def __init__(self, paths):
        self.workers = 1 + max(max(pair) for pair in paths)
        self.paths = paths

    def path(self, source, target):
        return self.paths[source, target]


def arrivals(network, messages):
    """When messages arrive that are sent at 0 s, given as (source, target, size)."""
    found, clock = [], Clock()
    carrier = Carrier(network, {}, clock, found.append)
    for source, target, size in messages:
        carrier.send(0.0, source, target, size)
    clock.run()
    times = {(message.source, message.target): message.tail for message in found}
    return [times[source, target] for source, target, _ in messages]


@examples
@given(
    size=st.integers(0, 10**6),
    links=st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_a_message_alone_takes_all_latencies_and_the_slowest_link(size, links):
    path = tuple(Link(rate, latency) for rate, latency in links)
    (time,) = arrivals(Routes({(0, 1): path}), [(0, 1, size)])
    assert time == pytest.approx(sum(latency for _, latency in links) + size / min(rate for rate, _ in links))


def test_two_messages_to_one_host_arrive_one_after_the_other():
    """The example of the model's description."""
    network = Network.switch(3, latency=1.0, bandwidth=100)
    assert arrivals(network, [(1, 0, 100), (2, 0, 100)]) == [2.0, 3.0]
    assert arrivals(network, [(2, 0, 100), (1, 0, 100)]) == [3.0, 2.0]


def test_both_directions_of_a_cable_are_used_at_the_same_time():
    assert arrivals(Network.switch(2, bandwidth=100), [(0, 1, 100), (1, 0, 100)]) == [1.0, 1.0]


def two_racks(core):
    """Four hosts of 100 bytes/s in each of two racks, and between these one link of `core` bytes/s each way."""
    up, down = [Link(100) for _ in range(8)], [Link(100) for _ in range(8)]
    between = {0: Link(core), 1: Link(core)}
    return Routes(
        {
            (a, b): (up[a], down[b]) if a // 4 == b // 4 else (up[a], between[a // 4], down[b])
            for a in range(8)
            for b in range(8)
        }
    )


def test_messages_between_racks_share_the_link_between_them():
    crossing = [(host, host + 4, 100) for host in range(4)]
    assert arrivals(two_racks(core=400), crossing) == [1.0, 1.0, 1.0, 1.0]
    assert arrivals(two_racks(core=200), crossing) == [1.0, 1.0, 1.5, 2.0]
    assert arrivals(two_racks(core=50), crossing) == [2.0, 4.0, 6.0, 8.0]
    assert arrivals(two_racks(core=50), [(0, 1, 100), (4, 0, 100), (0, 5, 100)]) == [1.0, 2.0, 3.0]


@examples
@given(
    core=st.integers(1, 1000),
    messages=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 1000)), min_size=1, unique_by=lambda m: m[:2]
    ),
)
def test_no_link_carries_more_than_its_rate(core, messages):
    """The last of the messages that share a link cannot arrive before the link has carried them all."""
    network = two_racks(core)
    times = arrivals(network, messages)
    loads = {}
    for (source, target, size), time in zip(messages, times, strict=True):
        assert time >= size / min(link.rate for link in network.path(source, target)) * (1 - 1e-12)
        for link in network.path(source, target):
            loads.setdefault(link, []).append((size, time))
    for link, carried in loads.items():
        total = sum(size for size, _ in carried)
        assert max(time for _, time in carried) >= total / link.rate * (1 - 1e-12)


def test_a_link_remembers_what_it_is_busy_with():
    network, busy = Network.switch(2, bandwidth=100), {}
    found = []
    for _ in range(2):
        clock = Clock()
        Carrier(network, busy, clock, found.append).send(0.0, 0, 1, 100)
        clock.run()
    assert [message.tail for message in found] == [1.0, 2.0]


@pytest.mark.parametrize("bandwidth,latency", [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf), (1, math.nan)])
def test_a_link_that_cannot_be_is_refused(bandwidth, latency):
    with pytest.raises(ConfigError, match="give"):
        Network.switch(2, latency=latency, bandwidth=bandwidth)


def test_switches_of_the_same_measures_are_equal_and_say_what_they_are():
    network = Network.switch(4, latency=1e-3, bandwidth=125e6)
    assert network == Network.switch(4, latency=1e-3, bandwidth=125e6)
    assert repr(network) == "Switch(workers=4, latency=0.001, bandwidth=125000000.0)"
