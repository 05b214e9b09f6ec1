"""density="auto": what the line carries while training computes."""

import time

import pytest
import torch
from torch.optim import SGD

import spardl
from processes import on_processes
from spardl.integrations.throttle import EVERY, Throttle
from threads import on_threads
from training import all_equal, loss_of, mlp


def settle(throttle, *, seconds_at_full, had, exchanges=200):
    """Exchanges whose time is in proportion to what they send."""
    for _ in range(exchanges):
        throttle.observe(took=seconds_at_full * throttle.density, had=had)
        if throttle.is_due:
            throttle.apply(min(throttle._ratios))
    return throttle.density


def test_it_settles_a_little_below_what_fits():
    assert settle(Throttle(0.001, 0.5), seconds_at_full=10.0, had=0.5) == pytest.approx(0.045, rel=0.01)


def test_it_stays_between_floor_and_ceiling():
    assert settle(Throttle(0.01, 0.2), seconds_at_full=1000.0, had=0.1) == 0.01
    assert settle(Throttle(0.01, 0.2), seconds_at_full=0.01, had=1.0) == 0.2


def test_the_rank_with_the_least_to_spare_decides_for_all():
    def rank(transport):
        throttle = Throttle(0.001, 0.9)
        for _ in range(EVERY):
            throttle.observe(took=1.0, had=1.0 if transport.rank == 2 else 50.0)
        throttle.adjust(transport)
        return throttle.density

    start = Throttle(0.001, 0.9).density
    assert on_threads(3, rank) == pytest.approx([0.9 * start] * 3)


def _train(rank, workers):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.05)
    given = {"update": "local", "delay": 1, "density": "auto", "density_limits": (0.01, 0.4), "dense_below": 0}
    sync = spardl.attach(model, optimizer=optimizer, timeout=30, **given)
    densities = []
    sync.observe(lambda event: densities.append(event.density))
    for step in range(24):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        time.sleep(0.02)  # something to hide an exchange behind
        optimizer.step()
    with sync.shared():
        shared = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return densities, shared.clone(), sync.stats().total.density


def test_ranks_agree_and_the_achieved_density_is_in_the_statistics():
    ranks = on_processes(2, _train)
    assert ranks[0][0] == ranks[1][0] and all_equal(shared for _, shared, _ in ranks)
    densities = ranks[0][0]
    assert len(set(densities)) > 1, "the density never changed"
    assert all(0.005 < density <= 0.41 for density in densities)
    assert ranks[0][2] == pytest.approx(sum(densities) / len(densities), rel=0.05)
