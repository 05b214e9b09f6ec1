"""SparDL as a whole: nothing is lost, all ranks agree, messages never grow, and the price is the published one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clusters import Cluster
from conservation import check_step, heavy_tailed, total
from effort import tries
from spardl.choices import is_power_of_two
from spardl.config import SyncConfig
from spardl.errors import ConfigError

VALUES = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "int1")


def divisors(workers):
    return [teams for teams in range(1, workers + 1) if workers % teams == 0]


def settings_for(workers):
    """Every way to form teams, with every gather that can serve it."""
    return [(d, g) for d in divisors(workers) for g in "rb" if g == "b" or is_power_of_two(d)]


# Most counts in one format and every format for some counts; the rest takes minutes.
FEW = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 17)
FEW_BITS = ("int4", "int2", "int1")
EVERY = [
    pytest.param(workers, values, marks=[] if workers in some else [pytest.mark.slow])
    for workers in range(1, 18)
    for values in VALUES
    for some in [FEW if values == "bf16" else (3, 4) if values in FEW_BITS else (2, 3, 6, 9)]
]


@pytest.mark.parametrize(("workers", "values"), EVERY)
def test_nothing_is_lost_and_all_ranks_agree(workers, values):
    """Over three chained steps, for every team count and gather, what went in came out or was kept."""
    for teams, gather in settings_for(workers):
        for residuals in ("carry", "return"):
            length = 200 + 7 * workers
            config = SyncConfig(density=0.06, teams=teams, gather=gather, values=values, residuals=residuals)
            cluster = Cluster(workers, length, config)
            generator = torch.Generator().manual_seed(teams)
            allowed = int(cluster.methods[0].layout.budgets(0.06).sum())
            for _ in range(3):
                result = check_step(cluster, heavy_tailed(workers, length, generator))
                assert result.count_nonzero() <= allowed
            # The simulated network refuses frames over their capacity, and frames refuse entries over their budget.


@given(
    workers=st.integers(1, 17),
    pick=st.integers(0, 99),
    length=st.integers(1, 300),
    density=st.floats(0.001, 1),
    values=st.sampled_from(VALUES),
    blocks=st.sampled_from(("interleaved", "contiguous")),
    residuals=st.sampled_from(("carry", "return")),
    selection=st.sampled_from(("lazy", "eager")),
    indices=st.sampled_from(("rice", "fixed", "raw")),
    kind=st.sampled_from(("heavy", "ties", "zeros", "same")),
    seed=st.integers(0, 2**31),
)
@tries(80)
def test_nothing_is_lost_whatever_is_chosen(
    workers, pick, length, density, values, blocks, residuals, selection, indices, kind, seed
):
    """Odd lengths, ties, zeros, lengths below the worker count, all options."""
    choices = settings_for(workers)
    teams, gather = choices[pick % len(choices)]
    config = SyncConfig(
        density=density,
        teams=teams,
        gather=gather,
        values=values,
        blocks=blocks,
        residuals=residuals,
        selection=selection,
        indices=indices,
    )
    cluster = Cluster(workers, length, config)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        gradients = heavy_tailed(workers, length, generator)
        if kind == "ties":
            gradients = [gradient.round() for gradient in gradients]
        elif kind == "zeros":
            gradients = [gradient * (torch.rand(length, generator=generator) < 0.05) for gradient in gradients]
        elif kind == "same":
            gradients = [torch.full((length,), -2.5)] * workers
        check_step(cluster, gradients)


@pytest.mark.parametrize("workers", range(1, 18))
def test_density_one_is_the_dense_sum(workers):
    """With nothing cut and nothing rounded, the result is the plain sum and no residual stays."""
    for teams, gather in settings_for(workers):
        for blocks in ("interleaved", "contiguous"):
            config = SyncConfig(density=0.9999, teams=teams, gather=gather, values="fp32", blocks=blocks)
            cluster = Cluster(workers, 97, config)  # of whose elements that is all
            gradients = heavy_tailed(workers, 97, torch.Generator().manual_seed(0))
            expected = total(gradients) / workers
            torch.testing.assert_close(cluster.step(gradients)[0].double(), expected, rtol=1e-5, atol=1e-5)
            for rank, residual in enumerate(cluster.residuals()):
                assert not residual.any(), f"rank {rank} kept something"


def reference_sum(vectors, budgets, chunk_of):
    """Spar-Reduce-Scatter for one team, straight from the paper: dense blocks, cut when they leave."""
    size = len(vectors)
    held = [[vector[chunk_of == block].copy() for block in range(size)] for vector in vectors]
    gap = 2 ** max(0, math.ceil(math.log2(size)) - 1) if size > 1 else 0
    while gap >= 1:
        outgoing = []
        for p in range(size):
            for offset in range(gap, min(2 * gap, size)):
                block = (p + offset) % size
                outgoing.append(((p + gap) % size, block, cut(held[p][block], budgets[block])))
        for to, block, values in outgoing:
            held[to][block] = (held[to][block] + values).astype(np.float32)
        gap //= 2
    out = np.zeros_like(vectors[0])
    for p in range(size):
        out[chunk_of == p] = cut(held[p][p], budgets[p])
    return out


def cut(block, budget):
    kept = sorted(range(len(block)), key=lambda i: (-abs(block[i]), i))[:budget]
    out = np.zeros_like(block)
    out[kept] = block[kept]
    return out


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 6, 8, 14])
@pytest.mark.parametrize("blocks", ["interleaved", "contiguous"])
def test_one_team_equals_the_paper(workers, blocks):
    config = SyncConfig(density=0.1, teams=1, values="fp32", blocks=blocks)
    cluster = Cluster(workers, 203, config)
    layout = cluster.methods[0].layout
    chunk_of = np.arange(203) // layout.chunk % workers
    gradients = heavy_tailed(workers, 203, torch.Generator().manual_seed(workers))
    expected = reference_sum([g.numpy() for g in gradients], layout.budgets(0.1), chunk_of)
    np.testing.assert_array_equal(cluster.step(gradients)[0].numpy(), expected * np.float32(1 / workers))


@pytest.mark.parametrize("workers", range(1, 18))
def test_rounds_and_bytes_equal_the_formulas(workers):
    """2 ceil(log2 m) + ceil(log2 d) rounds, and the published number of 8-byte entries plus the frames' headers."""
    length, k = 40 * workers, 4 * workers
    for teams, gather in settings_for(workers):
        size = workers // teams
        config = SyncConfig(density=0.1, teams=teams, gather=gather, values="fp32", indices="raw")
        cluster = Cluster(workers, length, config)
        cluster.step(heavy_tailed(workers, length, torch.Generator().manual_seed(0)))
        depth, across = math.ceil(math.log2(size)), math.ceil(math.log2(teams))
        offer = k // size // teams  # h starts at k/P
        between = teams.bit_length() - 1 if gather == "r" else teams - 1
        entries = 2 * k * (workers - teams) // workers + between * (k * teams // workers if gather == "r" else offer)
        headers = 8 * (2 * depth + across) + 2 * (size - 1) + between
        for rank, traffic in enumerate(cluster.network.traffic):
            assert traffic.rounds == traffic.messages == 2 * depth + across
            if gather == "r" or teams == 1:
                assert cluster.entries_sent()[rank] == entries
                assert traffic.bytes_sent == 8 * entries + headers
            else:  # the union of the teams' offers may be smaller than the budget that it fills
                assert cluster.entries_sent()[rank] <= entries
                assert traffic.bytes_sent <= 8 * entries + headers


def test_a_million_elements_at_one_percent_take_few_bits():
    """bf16 values and Rice-coded gaps: 24.2 bits an entry where index and float32 take 64."""
    config = SyncConfig(density=0.01)
    cluster = Cluster(4, 1_000_000, config)
    cluster.step(heavy_tailed(4, 1_000_000, torch.Generator().manual_seed(0)))
    for traffic, sent in zip(cluster.network.traffic, cluster.entries_sent(), strict=True):
        assert 8 * traffic.bytes_sent / sent < 24.5


@pytest.mark.parametrize("gather", ["r", "b"])
@pytest.mark.parametrize("workers,teams", [(6, 1), (8, 4), (12, 2), (16, 8)])
def test_returned_residuals_are_the_owners_own_values(workers, teams, gather):
    """Where the result has no entry, every worker has back exactly what it put in."""
    config = SyncConfig(density=0.05, teams=teams, gather=gather, residuals="return")
    cluster = Cluster(workers, 400, config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        before = cluster.residuals()
        gradients = heavy_tailed(workers, 400, generator)
        result = cluster.step(gradients)[0]
        outside = torch.ones(400, dtype=torch.bool)
        outside[torch.as_tensor(cluster.supports[0])] = False
        for own, old, now in zip(gradients, before, cluster.residuals(), strict=True):
            assert torch.equal(now[outside], (own + old)[outside])
        assert result[outside].count_nonzero() == 0


def test_partial_and_local_residuals_lose_what_they_are_known_to_lose():
    """Ablation: carry and return lose nothing, partial a little, local much."""
    lost = {}
    for residuals in ("carry", "return", "partial", "local"):
        cluster = Cluster(8, 2000, SyncConfig(density=0.05, teams=1, values="fp32", residuals=residuals))
        gradients = heavy_tailed(8, 2000, torch.Generator().manual_seed(3))
        result = cluster.step(gradients)[0]
        gone = total(gradients) - 8 * result.double() - total(cluster.residuals())
        lost[residuals] = float(gone.abs().sum() / total([g.abs() for g in gradients]).sum())
    assert lost["carry"] < 1e-6 and lost["return"] < 1e-6
    assert 1e-5 < lost["partial"] < lost["local"]


def test_eager_selection_drops_more_than_lazy():
    kept = {}
    for selection in ("lazy", "eager"):
        cluster = Cluster(8, 4000, SyncConfig(density=0.05, teams=1, values="fp32", selection=selection))
        gradients = heavy_tailed(8, 4000, torch.Generator().manual_seed(5))
        kept[selection] = float(cluster.step(gradients)[0].abs().sum())
    assert kept["eager"] < kept["lazy"]


@pytest.mark.parametrize("workers", range(1, 18))
def test_one_poisoned_rank_poisons_all(workers):
    """A rank without a usable gradient is known to every rank by the end of the exchange, for any teams."""
    for teams, gather in settings_for(workers):
        for bad in {0, workers // 2, workers - 1}:
            cluster = Cluster(workers, 100, SyncConfig(density=0.1, teams=teams, gather=gather))
            gradients = [torch.ones(100) for _ in range(workers)]
            gradients[bad][bad] = torch.inf
            cluster.step(gradients)
            assert all(cluster.poisoned)


@pytest.mark.parametrize(
    ("workers", "teams", "order"), [(4, 2, (0, 2, 1, 3)), (6, 3, (5, 1, 2, 0, 4, 3)), (6, 2, (3, 0, 1, 2, 5, 4))]
)
def test_teams_may_be_formed_of_ranks_in_any_order(workers, teams, order):
    """Nothing is lost, and all ranks agree, also where those of one team are not numbered side by side."""
    cluster = Cluster(workers, 300, SyncConfig(density=0.06, teams=teams, order=order))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        check_step(cluster, heavy_tailed(workers, 300, generator))
    size = workers // teams
    assert cluster.methods[order[0]].team.ranks == order[:size]


def test_an_order_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="does not list the ranks 0 to 3"):
        SyncConfig(order=(0, 1, 1, 3)).check_for(4)
    with pytest.raises(ConfigError, match="lists no ranks"):
        SyncConfig(order=(0, "b"))
