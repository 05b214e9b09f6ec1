"""The simulated network: its clock, its counters, and what it refuses."""

import pytest
import torch

from spardl.collectives.program import AllReduce, Round
from spardl.config import SyncConfig
from spardl.errors import ConfigError, ProtocolError
from spardl.simulation import simulate
from spardl.transport.simulated import SimulatedNetwork


def frame(size):
    return torch.zeros(size, dtype=torch.uint8)


def test_a_message_takes_latency_plus_size_over_bandwidth():
    def program(rank):
        yield Round([(1 - rank, frame(1000))], [(1 - rank, 1000)], "swap")

    network = SimulatedNetwork(2, latency=0.5, bandwidth=1000)
    network.run([program(0), program(1)])
    assert network.clocks == [1.5, 1.5]
    assert [t.bytes_sent for t in network.traffic] == [t.bytes_received for t in network.traffic] == [1000, 1000]


def test_messages_of_one_round_share_the_links():
    """Two messages leave one after the other, and two that arrive together are received one after the other."""

    def hub():
        yield Round([(1, frame(100)), (2, frame(100))], [(1, 100), (2, 100)], "hub")

    def spoke():
        yield Round([(0, frame(100))], [(0, 100)], "spoke")

    network = SimulatedNetwork(3, latency=0.0, bandwidth=100)
    network.run([hub(), spoke(), spoke()])
    assert network.clocks == [2.0, 1.0, 2.0]


def test_a_late_sender_delays_its_receiver():
    def first():
        yield Round([(1, frame(100))], [], "early")

    def second():
        yield Round([], [(0, 100)], "wait")
        yield Round([(2, frame(100))], [], "pass on")

    def third():
        yield Round([], [(1, 100)], "wait")

    network = SimulatedNetwork(3, latency=1.0, bandwidth=100)
    network.run([first(), second(), third()])
    assert network.clocks == [1.0, 3.0, 4.0]


def test_an_all_reduce_costs_what_a_ring_costs():
    tensors = [torch.full((8,), float(rank)) for rank in range(4)]

    def program(rank):
        yield AllReduce(tensors[rank])

    network = SimulatedNetwork(4, latency=1.0, bandwidth=32)
    network.run([program(rank) for rank in range(4)])
    assert all(torch.equal(tensor, torch.full((8,), 6.0)) for tensor in tensors)
    assert network.time == 6 * 1.0 + 1.5 * 32 / 32
    assert {(t.rounds, t.bytes_sent) for t in network.traffic} == {(6, 48)}


def test_programs_that_wait_for_each_other_are_told_so():
    def program(rank):
        yield Round([], [(1 - rank, 10)], "hopeless")

    with pytest.raises(ProtocolError, match="rank 0 in hopeless for 1; rank 1 in hopeless for 0"):
        SimulatedNetwork(2).run([program(0), program(1)])


def test_a_message_over_its_capacity_is_refused():
    def program(rank):
        yield Round([(1 - rank, frame(11))], [(1 - rank, 10)], "swap")

    with pytest.raises(ProtocolError, match="sent 11 bytes"):
        SimulatedNetwork(2).run([program(0), program(1)])


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
