"""Reports of simulated steps: what they count, what they notice, and what they refuse."""

import pytest

import spardl
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.simulator.simulation import simulate


def test_the_report_counts_what_the_formulas_say():
    """14 workers in 7 teams: 2 ceil(log2 2) + ceil(log2 7) rounds."""
    config = SyncConfig(density=0.01, teams=7)
    report = simulate(workers=14, elements=20_000, config=config, latency=50e-6, bandwidth=125e6)
    assert (report.rounds, report.teams, report.conserved) == (5, 7, True)
    assert report.nnz <= 200
    assert report.time_s >= 5 * 50e-6


def test_the_report_notices_what_is_lost():
    config = SyncConfig(density=0.01, teams=1, residuals="local")
    assert not simulate(workers=8, elements=2000, config=config).conserved


@pytest.mark.parametrize("workers,elements,steps", [(0, 10, 1), (2, 0, 1), (2, 10, 0)])
def test_nothing_to_simulate_is_an_error(workers, elements, steps):
    with pytest.raises(ConfigError, match="give 1 or more"):
        simulate(workers=workers, elements=elements, config=SyncConfig(), steps=steps)


def test_the_public_function_is_not_hidden_by_a_package_of_the_same_name():
    """Importing a package binds its name in `spardl`, so what users call would be a module from then on."""
    assert spardl.simulate is simulate
    assert spardl.simulate(workers=1, elements=1, config=SyncConfig()).conserved
