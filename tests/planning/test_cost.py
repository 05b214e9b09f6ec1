"""Costs: lines fitted to measurements, or to the real programs on the simulated network."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigError
from spardl.planning.cost import CostModel, Linear, Measured, exchange_at, exchange_cost, fit, from_network, published
from spardl.simulator.simulation import simulate

NETWORK = {"latency": 2e-4, "bandwidth": 1.25e7}


@given(startup=st.floats(0, 0.1), slope=st.floats(1e-12, 1e-6), sizes=st.lists(st.integers(1, 10**8), min_size=2))
def test_a_fit_recovers_the_line_that_the_samples_lie_on(startup, slope, sizes):
    line = Linear(startup, slope)
    found = fit([(size, line(size)) for size in sizes])
    for size in sizes:
        assert found(size) == pytest.approx(line(size), rel=1e-6)


def test_a_fit_finds_start_up_and_slope_in_noisy_samples():
    """With 5 % of noise on sizes over four decades, both are found within a few per cent."""
    generator = np.random.default_rng(0)
    line = Linear(1e-3, 2e-9)
    sizes = np.geomspace(1e3, 1e7, 40).astype(int).tolist()
    found = fit([(size, line(size) * generator.normal(1, 0.05)) for size in sizes])
    assert found.startup == pytest.approx(line.startup, rel=0.05)
    assert found.per_element == pytest.approx(line.per_element, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 10)), min_size=1, max_size=10))
def test_no_part_of_a_fit_is_negative(samples):
    found = fit(samples)
    assert found.startup >= 0
    assert found.per_element >= 0
    assert math.isfinite(found.startup + found.per_element)


def test_falling_times_give_a_constant_and_times_below_the_line_no_start_up():
    assert fit([(10, 3.0), (20, 1.0)]).per_element == 0
    assert fit([(10, 1.0), (20, 3.0)]).startup == 0


@pytest.mark.parametrize("samples", [[], [(0, 1.0)], [(10, -1.0)], [(10, math.nan)]])
def test_measurements_that_cannot_be_are_refused(samples):
    with pytest.raises(ConfigError, match="fitted"):
        fit(samples)


def test_nothing_costs_nothing():
    assert Linear(1.0, 1.0)(0) == 0
    assert published(2).selection(0) == published(2).exchange(0) == 0


def test_a_selection_either_stalls_backward_or_occupies_the_channel():
    blocking = CostModel(Linear(1, 0), Linear(2, 0))
    beside = dataclasses.replace(blocking, selection_blocks=False)
    assert (blocking.stall(5), blocking.occupation(5)) == (1, 2)
    assert (beside.stall(5), beside.occupation(5)) == (0, 3)


@pytest.mark.parametrize("method", METHODS)
def test_the_network_model_agrees_with_the_simulation_of_every_method(method):
    """A line fitted at small sizes foretells the time of a settled step at sizes that it has not seen."""
    config = SyncConfig(method=method, density=0.02)
    cost = from_network(config, 4, **NETWORK)
    for elements in (60_000,):
        start, whole = (
            steps * simulate(workers=4, elements=elements, config=config, steps=steps, **NETWORK).time_s
            for steps in (4, 8)
        )
        assert cost.exchange(elements) == pytest.approx((whole - start) / 4, rel=0.1)


def test_the_network_model_takes_any_number_of_workers_and_the_density_at_the_end_of_a_schedule():
    schedule = DensitySchedule(target=0.01, start=0.25, steps=100)
    config = SyncConfig(density=schedule)
    for workers in (1, 3, 6):
        found = exchange_cost(config, workers, **NETWORK)
        assert found == exchange_cost(SyncConfig(density=0.01), workers, **NETWORK)
        assert (found(10_000) > 0) == (workers > 1)


def test_groups_that_would_go_dense_cost_what_dense_costs():
    config = SyncConfig(density=0.01, dense_below=5000)
    cost = from_network(config, 4, **NETWORK)
    dense = from_network(SyncConfig(method="dense"), 4, **NETWORK)
    assert cost.exchange(4999) == pytest.approx(dense.exchange(4999))
    assert cost.exchange(5000) < 0.5 * cost.exchange(4999)


def test_selection_runs_at_the_rate_given():
    cost = from_network(SyncConfig(density=0.1), 2, selection_rate=1e6, **NETWORK)
    assert cost.selection(2_000_000) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="elements per second"):
        from_network(SyncConfig(), 2, selection_rate=0)


def test_the_exchange_over_densities_rises_with_density_and_meets_the_simulation():
    config = SyncConfig()
    cost = exchange_at(config, 4, [0.01, 0.1], **NETWORK)
    times = [cost(50_000, density) for density in np.linspace(0.01, 0.1, 10)]
    assert times == sorted(times)
    simulated = simulate(workers=4, elements=50_000, config=dataclasses.replace(config, density=0.1), **NETWORK).time_s
    assert times[-1] == pytest.approx(simulated, rel=0.03)


def test_the_published_costs_are_those_of_four_clusters():
    cost = published(4)
    assert cost.selection(1024) == pytest.approx(2.18896957e-10 * 1024 * 10)
    assert cost.exchange(1000) == pytest.approx(2 * (2.7e-3 + 1.3e-8 * 0.001 * 1000 * 4 * 4))
    with pytest.raises(ConfigError, match="2, 4, 8, 16 workers, not for 3"):
        published(3)


def test_measured_costs_go_through_what_was_measured() -> None:
    """Straight in between, in proportion beyond, never falling, and nothing for nothing."""
    cost = Measured.of([(100, 1.0), (200, 0.5), (300, 4.0)])
    assert [cost(n) for n in (0, 1, 100, 200, 250, 300, 600)] == [0.0, 1.0, 1.0, 1.0, 2.5, 4.0, 8.0]
