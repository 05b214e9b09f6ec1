"""Weights that ranks step by themselves, and exchange: every method, 1 to 17 workers, all formats, without a socket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spardl
from clusters import WeightCluster
from conservation import heavy_tailed, total
from effort import tries
from spardl.wire.format import VALUE_FORMATS

METHODS = spardl.methods()
FORMATS = [name for name, form in VALUE_FORMATS.items() if form.carries_values]
LOSSLESS = ("carry", "return")
FEW = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17)  # the others as well, if there is time
EVERY = [pytest.param(workers, marks=[] if workers in FEW else pytest.mark.slow) for workers in range(1, 18)]


def cluster_of(workers, length, seed=0, **config):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(length, generator=generator)
    return WeightCluster(workers, weights, spardl.SyncConfig(**config)), generator


def stepped(cluster, generator, size=0.1):
    """Every rank's own weights move, each by something else."""
    for own, move in zip(cluster.own, heavy_tailed(cluster.workers, len(cluster.own[0]), generator), strict=True):
        own.sub_(size * move)


def check_exchange(cluster, generator, *, late=False):
    """One exchange under the promises; `late`: own weights are stepped on while it is under way."""
    stepped(cluster, generator)
    landings = cluster.begin()
    if late:
        stepped(cluster, generator)
    before, own = [each.clone() for each in cluster.own], total(cluster.own)
    size = total([each.abs() for each in cluster.own]) + total([each.abs() for each in cluster.shared])
    cluster.land(landings)
    for rank, shared in enumerate(cluster.shared):
        assert torch.equal(shared, cluster.shared[0]), f"rank {rank} shares other weights than rank 0"
    lost = (total(cluster.own) - own).abs()
    worst = int((lost - 1e-5 * size).argmax())
    assert lost[worst] <= 1e-5 * size[worst], f"coordinate {worst} lost {lost[worst]:.3g} of {size[worst]:.3g}"
    for rank, (landing, old) in enumerate(zip(landings, before, strict=True)):
        if landing.support is not None:
            others = torch.ones(len(old), dtype=torch.bool)
            others[landing.support] = others[landing.touched] = False
            assert torch.equal(cluster.own[rank][others], old[others]), f"rank {rank} has moved what was not touched"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", EVERY)
def test_the_sum_of_all_own_weights_stays_and_shared_ones_are_the_same_bits(method, workers):
    """Five exchanges in a row, of which some land late; the length divides by nothing."""
    cluster, generator = cluster_of(workers, 251, workers, method=method, density=0.08, values="fp32")
    for number in range(5):
        check_exchange(cluster, generator, late=number % 2 == 1)


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("residuals", LOSSLESS)
@pytest.mark.parametrize("workers", [3, 4])
def test_every_format_and_residual_policy_keeps_them(values, residuals, workers):
    for method in ("spardl", "topka", "exdyna"):
        cluster, generator = cluster_of(workers, 300, workers, method=method, values=values, residuals=residuals)
        for _ in range(3):
            check_exchange(cluster, generator)


@given(
    workers=st.integers(1, 9),
    length=st.integers(1, 200),
    density=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**16),
    late=st.booleans(),
)
@tries(60)
def test_any_length_and_density_keeps_them(workers, length, density, seed, late):
    cluster, generator = cluster_of(workers, length, seed, density=density)
    for _ in range(2):
        check_exchange(cluster, generator, late=late)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_at_density_one_own_weights_become_the_shared_ones_to_the_bit_and_these_the_mean(method, workers):
    cluster, generator = cluster_of(workers, 130, 3, method=method, density=1.0)
    for _ in range(3):
        stepped(cluster, generator)
        mean = total(cluster.own) / workers
        cluster.land(cluster.begin())
        torch.testing.assert_close(cluster.shared[0].double(), mean, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(own, cluster.shared[0]) for own in cluster.own)


def test_what_was_sent_whole_leaves_no_difference_and_what_was_not_sent_stays_applied():
    """One worker alone has moved two weights: the larger move is shared by all, the smaller one stays its own."""
    cluster, _ = cluster_of(2, 100, density=0.01, values="fp32", method="topka")
    start = cluster.shared[0].clone()
    cluster.own[0][7] -= 4.0
    cluster.own[0][8] -= 1.0
    cluster.land(cluster.begin())
    moved = start.clone()
    moved[7] -= (start[7] - (start[7] - 4.0)) / 2
    assert torch.equal(cluster.shared[0], moved) and torch.equal(cluster.shared[1], moved)
    assert torch.equal(cluster.own[1], moved)
    assert cluster.own[0][7] == moved[7] and cluster.own[0][8] == start[8] - 1.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_stop_the_exchange_on_all_ranks_and_change_nothing(method, bad):
    cluster, generator = cluster_of(4, 200, 1, method=method, density=0.05)
    check_exchange(cluster, generator)
    stepped(cluster, generator)
    own = [each.clone() for each in cluster.own]
    shared = cluster.shared[0].clone()
    cluster.own[2][11] = bad
    assert cluster.begin() == [None] * 4
    cluster.own[2][11] = own[2][11]
    assert all(torch.equal(now, then) for now, then in zip(cluster.own, own, strict=True))
    assert all(torch.equal(each, shared) for each in cluster.shared)
    check_exchange(cluster, generator)
