"""Quantities are read as people write them."""

import math

import pytest

from spardl.cli.units import bytes_per_second, seconds
from spardl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"), [("50us", 50e-6), ("2ms", 2e-3), ("1s", 1.0), ("1.5 ms", 1.5e-3), ("10ns", 1e-8), ("0", 0.0)]
)
def test_a_time_is_a_number_and_a_unit(text: str, expected: float) -> None:
    """Latencies come in seconds, whatever unit they were written in."""
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1gbit", 1.25e8), ("100Mbit/s", 1.25e7), ("8kbit", 1e3), ("125MB", 1.25e8), ("1GB/s", 1e9), ("10 gbit", 1.25e9)],
)
def test_bits_are_spelt_out_and_bytes_are_a_capital_b(text: str, expected: float) -> None:
    """Bandwidths come in bytes per second."""
    assert bytes_per_second(text) == pytest.approx(expected)


def test_an_unlimited_bandwidth_can_be_asked_for() -> None:
    """`inf` is a network on which only latency costs."""
    assert bytes_per_second("inf") == math.inf


@pytest.mark.parametrize("text", ["50", "fast", "-1ms", "50 parsec", "", "1m s"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    """The error shows what was given and how to write it."""
    with pytest.raises(ConfigError, match="50us") as refusal:
        seconds(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", ["100mb", "100Mb", "1000", "quick", "1xbit"])
def test_a_bandwidth_that_might_mean_bits_or_bytes_is_refused(text: str) -> None:
    """`mb` is a megabit to some and a megabyte to others: nobody guesses."""
    with pytest.raises(ConfigError, match="1gbit"):
        bytes_per_second(text)


def test_no_bandwidth_at_all_is_refused() -> None:
    """A network that moves nothing would take forever."""
    with pytest.raises(ConfigError, match="more than 0"):
        bytes_per_second("0gbit")
