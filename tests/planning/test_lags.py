"""LAGS: densities that backward hides, and the delta of a selection."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.errors import ConfigError
from spardl.planning.cost import CostModel, Linear
from spardl.planning.lags import delta, densities
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


def random_choice(vector, count, generator):
    kept = torch.zeros_like(vector)
    chosen = torch.randperm(len(vector), generator=generator)[:count]
    kept[chosen] = vector[chosen]
    return kept


def test_the_closed_form_is_the_mean_of_random_choices():
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(200, generator=generator) ** 3
    deltas = [delta(vector, random_choice(vector, 20, generator), 20) for _ in range(2000)]
    assert sum(deltas) / len(deltas) == pytest.approx(1.0, abs=0.02)


def test_the_largest_entries_leave_less_than_chance():
    """Each rank's own largest entries, summed: below 1, as the convergence proof assumes."""
    generator = torch.Generator().manual_seed(1)
    ranks = [torch.randn(1000, generator=generator) ** 3 for _ in range(4)]
    sent = torch.zeros(1000)
    for rank in ranks:
        chosen = rank.abs().topk(50).indices
        sent[chosen] += rank[chosen]
    assert 0 < delta(sum(ranks), sent, 50) < 0.9


def test_delta_at_its_ends():
    vector = torch.tensor([3.0, -4.0])
    assert delta(vector, vector, 2) == 0.0
    assert delta(vector, torch.zeros(2), 1) == 2.0
    assert delta(vector, torch.zeros(2), 2) == math.inf
    assert delta(torch.zeros(2), torch.zeros(2), 1) == 0.0
    with pytest.raises(ConfigError, match="same group"):
        delta(vector, torch.zeros(3), 1)
