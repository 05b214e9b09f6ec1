"""Profiles: checked where they enter, the same on every rank after they agree."""

import json
import math
import time

import pytest

from spardl.errors import ConfigError
from spardl.planning.profile import BackwardClock, Layer, Profile, agreed


def profile(*seconds, forward=1.0, names="abc", elements=10):
    layers = (Layer(name, elements, each) for name, each in zip(names, seconds, strict=False))
    return Profile(tuple(layers), forward)


def test_a_profile_survives_json():
    """What one rank writes another reads, bit for bit."""
    given = profile(0.1, 1 / 3, forward=0.7)
    assert Profile.from_dict(json.loads(json.dumps(given.to_dict()))) == given


def test_totals_are_over_all_layers():
    assert (profile(0.25, 0.5).elements, profile(0.25, 0.5).backward) == (20, 0.75)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e-9, "0.1", None, True])
def test_times_are_finite_and_not_negative(seconds):
    with pytest.raises(ConfigError, match=r"layer 'a' cannot take .* seconds"):
        profile(seconds)
    with pytest.raises(ConfigError, match=r"the forward pass cannot take .* seconds"):
        profile(0.1, forward=seconds)


@pytest.mark.parametrize("elements", [-1, 1.5, "7", True])
def test_elements_are_counted(elements):
    with pytest.raises(ConfigError, match=r"layer 'a' cannot have .* elements"):
        profile(0.1, elements=elements)


def test_names_are_unique():
    with pytest.raises(ConfigError, match="'a' appears twice"):
        profile(0.1, 0.1, names="aa")


def test_a_profile_has_layers():
    with pytest.raises(ConfigError, match="without layers"):
        Profile(())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"forward": 0.0}, "has no 'layers'"),
        ({"forward": 0.0, "layers": [{"name": "a", "elements": 3}]}, "has no 'seconds'"),
        ({"forward": 0.0, "layers": [3]}, "not a profile"),
        ([1, 2], "not a profile"),
    ],
)
def test_what_is_not_a_profile_gets_a_sentence(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Profile.from_dict(given)


def test_a_profile_is_agreed_from_the_readings_of_all_ranks():
    """Mean times decide the order, also where ranks finished layers in different orders."""
    readings = [
        {"forward": 1.0, "ready": {"a": 0.25, "b": 0.5, "c": 1.0}},
        {"forward": 2.0, "ready": {"a": 0.75, "b": 0.25, "c": 1.5}},
    ]
    found = agreed(readings, {"a": 10, "b": 20, "c": 30})
    assert found.forward == 1.5
    assert [(layer.name, layer.elements, layer.seconds) for layer in found.layers] == [
        ("b", 20, 0.375),
        ("a", 10, 0.125),
        ("c", 30, 0.75),
    ]


def test_a_layer_that_backward_did_not_reach_is_ready_with_the_last_one():
    found = agreed(
        [{"forward": 0.0, "ready": {"a": 0.5}}, {"forward": 0.0, "ready": {"a": 0.5, "b": 0.1}}], {"b": 1, "a": 1}
    )
    assert {layer.name for layer in found.layers} == {"a", "b"} and found.backward == 0.5


def test_there_is_no_profile_without_readings():
    with pytest.raises(ConfigError, match="without readings"):
        agreed([], {"a": 1})


def test_a_clock_reads_medians_of_the_passes_that_count(monkeypatch):
    """A pass that was not kept, such as one of several micro-batches, leaves no trace."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = BackwardClock()
    for forward, backward in ((1.0, 2.0), (2.0, 3.0), (50.0, 70.0), (4.0, 16.0)):
        clock.forward_begins()
        now += forward
        clock.forward_ends()
        now += backward
        clock.stamp("a")
        if backward != 70.0:
            clock.keep()
    assert clock.passes == 3
    assert clock.reading() == {"forward": 2.0, "ready": {"a": 3.0}}
