"""Links, and networks some of whose links are changed."""

import math

import pytest

from spardl.errors import ConfigError
from spardl.simulator.network import Change, Changed, Link, Network, travel_time


@pytest.mark.parametrize("bandwidth,latency", [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf), (1, math.nan)])
def test_a_link_that_cannot_be_is_refused(bandwidth, latency):
    with pytest.raises(ConfigError, match="give"):
        Network.switch(2, latency=latency, bandwidth=bandwidth)


@pytest.mark.parametrize("loss", [-0.1, 1.0, math.nan])
def test_a_link_that_loses_everything_is_refused(loss):
    with pytest.raises(ConfigError, match="delivers nothing"):
        Link(loss=loss)


def test_a_lossy_link_carries_less_and_messages_wait_for_what_was_lost():
    """A message of two packets, each lost with 10 %: one in nineteen hundredths of the cases a round trip more."""
    link = Link(1000, 0.5, loss=0.1)
    assert link.goodput == pytest.approx(900)
    assert travel_time((link,), 2000) == pytest.approx(0.5 + 2 * 0.5 * (1 - 0.9**2))
    assert travel_time((Link(1000, 0.5),), 2000) == 0.5


def test_changed_links_are_found_by_their_names():
    network = Network.switch(3, latency=1.0, bandwidth=100)
    changed = Changed(network, [Change("worker 1 *", slower=4), Change("* up", longer=0.5, loss=0.1)])
    (up, down), (other, _) = changed.path(1, 1), changed.path(0, 1)
    assert (up.rate, up.latency, up.loss) == (25, 1.5, 0.1)
    assert (down.rate, down.latency, down.loss) == (25, 0, 0)
    assert (other.rate, other.latency) == (100, 1.5)
    assert changed.path(1, 2)[0] is up
    assert len(changed.links()) == len(network.links()) == 6


def test_a_change_of_no_link_says_what_links_are_called():
    with pytest.raises(ConfigError, match="no link is called 'worker 9 up'; this network has 'worker 0 up'"):
        Changed(Network.switch(3), [Change("worker 9 up", slower=2)])


def test_a_link_can_become_faster_but_not_infinitely_slow():
    with pytest.raises(ConfigError, match="times slower"):
        Change("*", slower=0)


def test_switches_of_the_same_measures_are_equal_and_say_what_they_are():
    network = Network.switch(4, latency=1e-3, bandwidth=125e6)
    assert network == Network.switch(4, latency=1e-3, bandwidth=125e6)
    assert repr(network) == "Switch(workers=4, latency=0.001, bandwidth=125000000.0, down=None)"
