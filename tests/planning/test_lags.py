"""LAGS: densities that backward hides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.errors import ConfigError
from spardl.planning.cost import CostModel, Linear
from spardl.planning.lags import densities
from spardl.planning.profile import Layer, Profile
from spardl.planning.timeline import predict

FLOOR, CEILING = 0.001, 0.1
STARTUP, PER_ENTRY = 1e-3, 1e-7


def exchange(elements, density):
    return STARTUP + PER_ENTRY * density * elements


def expensive(elements):
    return 1e9


def timeline(*seconds, elements=1_000_000, selection=0.0):
    layers = (Layer(str(i), elements, each) for i, each in enumerate(seconds))
    profile = Profile(tuple(layers))
    return predict(profile, CostModel(Linear(selection, 0), Linear(0, 0)), [1] * len(seconds))


def between(hide, *, dense=expensive, **options):
    """The density of a group whose successor's backward takes `hide`."""
    return densities(timeline(0.0, hide, **options), exchange, dense, floor=FLOOR, ceiling=CEILING)[0]


def test_a_group_sends_what_the_next_group_hides():
    """10 ms hide a start-up of 1 ms and 90,000 entries of 0.1 us each: 9 % of a million."""
    assert between(0.010) == pytest.approx(0.09, abs=2e-6)


def test_selection_is_part_of_what_must_be_hidden():
    assert between(0.010, selection=0.005) == pytest.approx(0.04, abs=2e-6)


def test_densities_stay_between_floor_and_ceiling():
    assert between(0.0) == FLOOR
    assert between(0.0005) == FLOOR
    assert between(1.0) == CEILING


def test_nothing_hides_the_last_group():
    assert densities(timeline(1.0, 1.0, 1.0), exchange, expensive)[-1] == 0.001


def test_dense_goes_where_dense_fits():
    def dense(elements):
        return 0.02

    assert between(0.02, dense=dense) == 1.0
    assert between(0.019, dense=dense) == CEILING


def test_dense_goes_where_it_takes_no_longer_than_sparse():
    assert between(0.0, dense=lambda elements: exchange(elements, FLOOR)) == 1.0


@given(st.lists(st.floats(0, 0.02), min_size=2, max_size=2), st.integers(0, 10**6), st.floats(0, 0.02))
def test_more_time_never_means_fewer_entries(hides, elements, dense):
    low, high = (between(hide, elements=elements, dense=lambda _: dense) for hide in sorted(hides))
    assert low <= high
    assert low == 1.0 or FLOOR <= low <= CEILING


@given(st.floats(0, 0.02), st.integers(1, 10**6))
def test_what_a_density_above_the_floor_costs_is_hidden(hide, elements):
    density = between(hide, elements=elements)
    if density > FLOOR:
        assert exchange(elements, density) <= hide * (1 + 1e-12) or density * elements < 1


@pytest.mark.parametrize(("floor", "ceiling"), [(0.0, 0.1), (0.1, 1.5), (0.2, 0.1)])
def test_a_floor_lies_below_its_ceiling_and_both_are_densities(floor, ceiling):
    with pytest.raises(ConfigError):
        densities(timeline(0.1), exchange, expensive, floor=floor, ceiling=ceiling)
