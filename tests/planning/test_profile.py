"""Profiles: checked where they enter, the same on every rank after averaging."""

import json
import math

import pytest

from spardl.errors import ConfigError
from spardl.planning.profile import Layer, Profile, average


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


def test_the_average_is_over_ranks_for_each_layer():
    mean = average([profile(0.25, 0.5, forward=1.0), profile(0.75, 0.0, forward=2.0)])
    assert mean == profile(0.5, 0.25, forward=1.5)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (profile(0.1), "rank 0 profiled 2 layers and rank 1 profiled 1"),
        (profile(0.1, 0.1, names="ax"), "layer 1 is 'b' on rank 0 and 'x' on rank 1"),
        (profile(0.1, 0.1, elements=11), "layer 'a' has 10 elements on rank 0 and 11 on rank 1"),
    ],
)
def test_ranks_that_profiled_different_models_are_told_what_differs(other, sentence):
    with pytest.raises(ConfigError, match=sentence):
        average([profile(0.1, 0.1), other])


def test_there_is_no_average_of_nothing():
    with pytest.raises(ConfigError, match="no profiles"):
        average([])
