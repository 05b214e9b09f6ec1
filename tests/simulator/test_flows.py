"""Flows: how long messages take that have links to themselves, and how they share them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.simulator.clock import Clock
from spardl.simulator.flows import Flows
from spardl.simulator.network import Link, Network, travel_time

examples = settings(deadline=None)


class Routes(Network):
    """Any paths, given as a dictionary."""

    def __init__(self, paths):
        self.workers = 1 + max(max(pair) for pair in paths)
        self.paths = paths

    def path(self, source, target):
        return self.paths[source, target]


def arrivals(network, messages):
    """When messages arrive, given as (source, target, size) or with the time at which they are sent."""
    clock = Clock()
    flows, found = Flows(clock), {}

    def send(number, message):
        source, target, size, *_ = message
        path = network.path(source, target)
        late = travel_time(path, size)
        flows.start(clock.now, path, size, lambda: found.update({number: clock.now + late}))

    for number, message in enumerate(messages):
        clock.at(message[3] if len(message) > 3 else 0.0, number, send, message)
    clock.run()
    return [found[number] for number in range(len(messages))]


@examples
@given(
    size=st.integers(0, 10**6),
    links=st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_a_message_alone_takes_all_latencies_and_the_slowest_link(size, links):
    path = tuple(Link(rate, latency) for rate, latency in links)
    (time,) = arrivals(Routes({(0, 1): path}), [(0, 1, size)])
    assert time == pytest.approx(sum(latency for _, latency in links) + size / min(rate for rate, _ in links))


def test_two_messages_to_one_host_share_its_line():
    """The example of the model's description."""
    network = Network.switch(3, latency=1.0, bandwidth=100)
    assert arrivals(network, [(1, 0, 100), (2, 0, 100)]) == pytest.approx([3.0, 3.0])


def test_a_message_has_the_line_to_itself_until_another_comes_and_after_it_has_left():
    """100 bytes/s until 1 s, half of it until the shorter one is through at 3 s, then all of it again."""
    network = Network.switch(3, bandwidth=100)
    assert arrivals(network, [(1, 0, 300), (2, 0, 100, 1.0)]) == pytest.approx([4.0, 3.0])


def test_both_directions_of_a_cable_are_used_at_the_same_time():
    assert arrivals(Network.switch(2, bandwidth=100), [(0, 1, 100), (1, 0, 100)]) == pytest.approx([1.0, 1.0])


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
    assert arrivals(two_racks(core=400), crossing) == pytest.approx([1.0] * 4)
    assert arrivals(two_racks(core=200), crossing) == pytest.approx([2.0] * 4)
    assert arrivals(two_racks(core=50), crossing) == pytest.approx([8.0] * 4)


def test_what_one_link_cannot_give_to_a_flow_others_get():
    """Two flows share a line of 100; one of them gets only 10 elsewhere, so the other has 90."""
    narrow, shared = Link(10), Link(100)
    network = Routes({(0, 1): (shared, narrow), (0, 2): (shared,)})
    assert arrivals(network, [(0, 1, 10), (0, 2, 90)]) == pytest.approx([1.0, 1.0])


def fair_rates(paths, capacity):
    """Progressive filling, the obvious way: all rise together, link after link is full."""
    rates, left = {}, dict(capacity)
    waiting = set(paths)
    while waiting:
        loads = {link: sum(link in paths[flow] for flow in waiting) for link in left}
        tightest = min((link for link in left if loads[link]), key=lambda link: left[link] / loads[link])
        level = left[tightest] / loads[tightest]
        for flow in [flow for flow in waiting if tightest in paths[flow]]:
            rates[flow] = level
            waiting.remove(flow)
            for link in paths[flow]:
                left[link] -= level
    return rates


@examples
@given(
    capacity=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    flows=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=10),
)
def test_rates_are_max_min_fair(capacity, flows):
    """What the compiled loop finds is what rising together until a link is full comes to."""
    from spardl.simulator import fair

    paths = {flow: sorted({link % len(capacity) for link in links}) for flow, links in enumerate(flows)}
    table = np.zeros((len(flows), 6), np.int32)
    for flow, links in paths.items():
        table[flow, : len(links)] = links
    hops = np.array([len(paths[flow]) for flow in range(len(flows))], np.int32)
    rates = np.zeros(len(flows))
    fair.share(table, hops, np.arange(len(flows), dtype=np.int32), np.array(capacity, float), rates)
    expected = fair_rates(paths, {link: float(each) for link, each in enumerate(capacity)})
    assert rates.tolist() == pytest.approx([expected[flow] for flow in range(len(flows))])


@examples
@given(
    core=st.integers(1, 1000),
    messages=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 1000), st.floats(0, 5)), min_size=1
    ),
)
def test_no_link_carries_more_than_its_rate(core, messages):
    """The last of the messages that share a link cannot arrive before the link has carried them all."""
    network = two_racks(core)
    times = arrivals(network, messages)
    loads = {}
    for (source, target, size, when), time in zip(messages, times, strict=True):
        assert time >= (when + size / min(link.rate for link in network.path(source, target))) * (1 - 1e-9)
        for link in network.path(source, target):
            loads.setdefault(link, []).append((size, when, time))
    for link, carried in loads.items():
        total = sum(size for size, _, _ in carried)
        assert max(time for *_, time in carried) >= (min(when for _, when, _ in carried) + total / link.rate) * (
            1 - 1e-9
        )


def test_bytes_are_counted_by_link():
    network = Network.switch(3, bandwidth=100)
    clock = Clock()
    flows = Flows(clock)
    for target, size in ((1, 30), (2, 50)):
        flows.start(0.0, network.path(0, target), size, lambda: None)
    clock.run()
    assert {link.name: size for link, size in flows.carried.items()} == {
        "worker 0 up": 80,
        "worker 1 down": 30,
        "worker 2 down": 50,
    }
