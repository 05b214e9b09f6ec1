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


def test_the_busiest_link_is_the_one_that_is_shared():
    from spardl.simulator.topologies import FatTree

    network = FatTree(8, bandwidth=1e6, rack=4, oversubscription=8)
    report = simulate(workers=8, elements=4000, network=network, teams=1, dense_below=0)
    assert report.busiest.name.startswith("rack")
    assert report.busiest.seconds <= report.time_s
    assert [link.seconds for link in report.links] == sorted((link.seconds for link in report.links), reverse=True)


def test_progress_ends_when_all_is_done():
    seen = []
    simulate(workers=3, elements=3000, steps=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12, 12) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_network_of_another_number_of_workers_is_refused():
    from spardl.simulator.network import Network

    with pytest.raises(ConfigError, match="connects 3 workers, not 4"):
        simulate(workers=4, elements=100, network=Network.switch(3))


@pytest.mark.slow
def test_a_thousand_workers_take_the_rounds_and_bytes_of_the_formula_and_lose_nothing():
    """2 ceil(log2 512) + 1 rounds; 2 k (P - 1)/P entries of about 24.5 bits."""
    report = simulate(workers=1024, elements=102_400, density=0.01)
    assert (report.rounds, report.teams, report.conserved) == (19, 2, True)
    assert report.bytes_sent_max == pytest.approx(2 * 1024 * 1023 / 1024 * report.bits_per_entry / 8, rel=0.01)
