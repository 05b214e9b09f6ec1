"""Whole steps: the same bits as with memory of its own for each gradient, and times that add up."""

import numpy as np
import pytest
import torch

from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.simulator.balance import Balance, places
from spardl.simulator.cluster import SimulatedCluster
from spardl.simulator.computing import Costs, Machine
from spardl.simulator.driver import Driver
from spardl.simulator.gradients import HeavyTailed
from spardl.simulator.network import Network
from spardl.simulator.simulation import _ranks, simulate
from spardl.simulator.training import Cluster, Training
from spardl.update import LocalUpdates

WORKERS, ELEMENTS, STEPS = 6, 3000, 3


@pytest.mark.parametrize("method", ["dense", "spardl", "topka", "gtopk", "oktopk", "exdyna", "deft"])
def test_one_stretch_of_memory_for_all_gradients_changes_no_bit(method):
    """Results, residuals and traffic are those of ranks that are given their gradients in memory of their own."""
    config, source = SyncConfig(method=method, density=0.02), HeavyTailed(seed=3, overlap=0.3)
    network = Network.switch(WORKERS, latency=1e-3, bandwidth=1e6)
    plain = SimulatedCluster(WORKERS, ELEMENTS, config, network=network)
    results = []
    for step in range(STEPS):
        gradients = [torch.empty(ELEMENTS) for _ in range(WORKERS)]
        for rank, gradient in enumerate(gradients):
            source.fill(step, rank, 0, gradient)
        results.append(plain.step(gradients)[0])

    seen = {}

    class Watched(Balance):
        def get_out(self, step, first, average):
            seen[step] = average.clone()
            super().get_out(step, first, average)

    balance = Watched(WORKERS, ELEMENTS)
    streamed = Cluster(_ranks(WORKERS, ELEMENTS, config, 1), Training(), source, Costs(), balance)
    driver = Driver(network)
    driver.run([streamed.program(rank, STEPS) for rank in range(WORKERS)])
    streamed.settle()
    assert balance.identical and balance.conserved
    for step in range(STEPS):
        assert torch.equal(seen[step], results[step])
    for ours, theirs in zip(streamed.ranks, plain.ranks, strict=True):
        assert torch.equal(ours.groups[0].buffer.values, theirs.groups[0].buffer.values)
    assert driver.traffic == plain.network.traffic


def test_a_vector_of_many_blocks_is_balanced_at_the_right_coordinates():
    """`places` says where the layout puts each element."""
    (sync,) = _ranks(1, 1000, SyncConfig(), 1)
    sync = _ranks(8, 1000, SyncConfig(teams=1, dense_below=0), 1)[0]
    buffer, natural = sync.groups[0].buffer, torch.arange(1000, dtype=torch.float32)
    buffer.write(0, natural)
    assert np.array_equal(buffer.values.numpy()[places(buffer.layout)], natural.numpy())


def per_step(training, **more):
    """Seconds per exchange of four workers, whose exchange alone takes 2 s (dense: two rounds and more)."""
    network = Network.switch(2, bandwidth=4000.0)
    return simulate(
        workers=2, elements=2000, method="dense", network=network, steps=4, training=training, **more
    ).time_s


def test_a_step_of_gradients_is_forward_backward_exchange_and_optimizer():
    assert per_step(Training()) == pytest.approx(2.0)
    assert per_step(Training(forward=1.0, backward=2.0, optimizer=0.5)) == pytest.approx(5.5)


def test_pieces_are_exchanged_while_backward_goes_on():
    """Two halves of 1 s each: the first one while backward computes the second for 2 s."""
    assert per_step(Training(forward=1.0, backward=4.0, pieces=2)) == pytest.approx(1.0 + 4.0 + 1.0)


def test_pieces_wait_for_the_line():
    """Where backward takes no time, halves go one after the other."""
    assert per_step(Training(pieces=2)) == pytest.approx(2.0)


def test_local_updates_exchange_every_few_steps():
    update = LocalUpdates(every=3)
    assert per_step(Training(forward=1.0, backward=1.0, optimizer=1.0, update=update)) == pytest.approx(9.0 + 2.0)


def test_an_exchange_that_may_be_late_is_hidden():
    """Steps of 3 s hide an exchange of 2 s, of which only the last has nothing beside it: 4 steps, then 2 s."""
    update = LocalUpdates(every=1, delay=1)
    assert per_step(Training(forward=3.0, update=update)) == pytest.approx((4 * 3.0 + 2.0) / 4)


def test_an_exchange_longer_than_a_step_is_waited_for():
    update = LocalUpdates(every=1, delay=1)
    assert per_step(Training(forward=0.5, update=update)) == pytest.approx((0.5 + 4 * 2.0) / 4)


def test_one_slow_worker_holds_all_back_unless_it_steps_less():
    training = Training(forward=1.0, update=LocalUpdates(every=4))
    slow = Machine(slower={1: 4.0})
    assert per_step(training, machine=slow) == pytest.approx(16.0 + 2.0)
    fitted = Training(forward=1.0, update=LocalUpdates(every=4), local_steps={1: 1})
    assert per_step(fitted, machine=slow) == pytest.approx(4.0 + 2.0)


def test_the_report_tells_computing_from_what_training_waits_for():
    report = simulate(
        workers=2,
        elements=2000,
        method="dense",
        bandwidth=4000.0,
        training=Training(forward=1.0, backward=2.0, optimizer=0.5),
        watched=[0],
    )
    assert (report.compute_s, report.exposed_s) == pytest.approx((3.5, 2.0))
    assert [span.name for span in report.spans] == ["forward", "backward", "all_reduce", "optimizer"]


@pytest.mark.parametrize("wrong", [{"forward": -1.0}, {"backward": float("nan")}, {"pieces": 0}])
def test_training_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="give"):
        Training(**wrong)
