"""The benchmark: what takes part averages as it should, and the limits beside the figures are right."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from processes import on_processes
from spardl.bench.contestants import Fp16, HandwrittenTopk, PowerSGD, Torch, factor_elements
from spardl.bench.limits import index_bits, limit, sparse_bytes
from spardl.bench.match import RIVALS, Match
from spardl.bench.run import Bench, Gradients
from spardl.bench.vectors import Vector, vector_of_length
from spardl.config import SyncConfig
from spardl.errors import ConfigError

# What its fixtures start is started once, not once per process that runs tests.
pytestmark = pytest.mark.xdist_group("bench")

VECTOR = Vector("", ((40, 50), (17,)))


# --- limits ---------------------------------------------------------------------------------------------------------


def test_indices_take_their_entropy() -> None:
    """Half of the places take a bit each, all or none nothing, and one in a hundred 8.08 bits per entry."""
    assert index_bits(500, 1000) == pytest.approx(1000)
    assert index_bits(0, 1000) == index_bits(1000, 1000) == 0
    assert index_bits(10_000, 1_000_000) / 10_000 == pytest.approx(8.08, abs=0.005)
    assert index_bits(3, 8) >= math.log2(math.comb(8, 3))


def test_values_come_on_top() -> None:
    assert sparse_bytes(100, 100, "fp32") == 400
    assert sparse_bytes(500, 1000, "bf16") == pytest.approx(125 + 1000)


def test_the_limit_adds_up() -> None:
    """Bytes over the rate, as many messages in a row as it takes to hear of everybody, and passes over memory."""
    found = limit(payload=1e6, workers=5, rate=1e7, latency=0.01, memory=0.002)
    assert (found.network, found.latency, found.memory) == pytest.approx((0.16, 0.03, 0.002))
    assert found.total == pytest.approx(0.192)
    assert limit(payload=1e6, workers=4).total == 0


def test_a_dense_vector_at_a_known_rate_takes_what_a_ring_takes() -> None:
    """14,728,266 floats between 4 hosts at 200 Mbit/s: 3.53 s."""
    assert limit(payload=4 * 14_728_266, workers=4, rate=25e6).total == pytest.approx(3.535, abs=0.001)


# --- vectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 2, 3, 97, 10_000, 14_728_266, 1_000_000_000])
def test_any_length_is_a_matrix_and_a_rest(elements: int) -> None:
    vector = vector_of_length(elements)
    assert vector.elements == elements
    rows, columns = vector.shapes[0]
    assert rows <= columns <= rows + 2


def test_lengths_beyond_reach_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 1,000,000,000"):
        vector_of_length(2_000_000_000)


@pytest.mark.parametrize(
    ("shape", "rank", "elements"), [((40, 50), 1, 90), ((40, 50), 4, 360), ((17,), 1, 17), ((4, 4), 4, 16)]
)
def test_low_rank_factors_are_counted(shape: tuple[int, ...], rank: int, elements: int) -> None:
    """Two thin matrices, or the tensor itself where they would not halve it."""
    assert factor_elements(shape, rank) == elements


# --- rivals ----------------------------------------------------------------------------------------------------------


def gradient(rank: int, step: int = 0) -> Tensor:
    return torch.randn(VECTOR.elements, generator=torch.Generator().manual_seed(100 * step + rank))


def mean(workers: int, step: int = 0) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(workers)]).mean(dim=0)


def averages(rank: int, workers: int) -> dict[str, Any]:
    """What each rival makes of a few gradients."""
    rivals = {
        "dense": Torch(VECTOR, 0.0),
        "fp16": Fp16(VECTOR, 0.0),
        "handwritten": HandwrittenTopk(VECTOR, 0.0, density=0.05),
        **{f"powersgd-{each}": PowerSGD(VECTOR, 0.0, rank=each) for each in (1, 4)},
    }
    found: dict[str, Any] = {name: [] for name in rivals}
    for step in range(6):
        for name, rival in rivals.items():
            # One gradient again and again for PowerSGD, whose power iteration comes closer with every step.
            vector = gradient(rank, 0 if name.startswith("powersgd") else step)
            rival.reduce(vector)
            found[name].append(vector)
    hand = rivals["handwritten"]
    assert isinstance(hand, HandwrittenTopk)
    found["residual"], found["costs"] = hand.residual, hand.costs()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_processes(request.param, averages)


def test_all_ranks_get_the_same(ranks: list[dict[str, Any]]) -> None:
    for name in ("dense", "fp16", "handwritten", "powersgd-1", "powersgd-4"):
        for step, result in enumerate(ranks[0][name]):
            for other in ranks[1:]:
                assert torch.equal(result, other[name][step]), f"{name} in step {step}"


def test_dense_gives_the_mean_and_fp16_nearly(ranks: list[dict[str, Any]]) -> None:
    """Half precision has 11 bits."""
    for step in range(6):
        expected = mean(len(ranks), step)
        assert torch.allclose(ranks[0]["dense"][step], expected, atol=1e-6)
        assert torch.allclose(ranks[0]["fp16"][step], expected, atol=4e-3)


def test_the_handwritten_topk_loses_nothing(ranks: list[dict[str, Any]]) -> None:
    """All gradients equal all results, times the ranks, plus what the ranks have kept."""
    workers = len(ranks)
    given = sum(gradient(rank, step) for step in range(6) for rank in range(workers))
    got = workers * sum(ranks[0]["handwritten"])
    kept = sum(rank["residual"] for rank in ranks)
    assert torch.allclose(given, got + kept, atol=1e-4)
    count = round(0.05 * VECTOR.elements)
    assert all(count <= int(result.count_nonzero()) <= workers * count for result in ranks[0]["handwritten"])


def test_the_handwritten_topk_counts_what_all_gathers_send(ranks: list[dict[str, Any]]) -> None:
    """A float and a 64-bit index per entry, to each other rank."""
    costs, workers = ranks[0]["costs"], len(ranks)
    assert costs.bytes_sent == (workers - 1) * 12 * round(0.05 * VECTOR.elements)
    assert costs.rounds == 2 * (workers - 1)
    assert 0.05 * VECTOR.elements <= round(costs.density * VECTOR.elements) <= workers * 0.05 * VECTOR.elements


@pytest.mark.parametrize("name", ["powersgd-1", "powersgd-4"])
def test_powersgd_makes_up_for_what_it_dropped(ranks: list[dict[str, Any]], name: str) -> None:
    """The mean of several steps on one gradient is closer to it than the first, and vectors are exact at once."""
    expected = mean(len(ranks))
    first, together = ranks[0][name][0], torch.stack(ranks[0][name]).mean(dim=0)
    assert torch.allclose(first[2000:], expected[2000:], atol=1e-6)
    assert torch.linalg.matrix_rank(first[:2000].view(40, 50)) == int(name[-1])
    assert (together - expected).norm() < (first - expected).norm() < expected.norm()


# --- a match --------------------------------------------------------------------------------------------------------


def match(**changes: Any) -> Match:
    configs = [SyncConfig(method=name, density=0.02) for name in ("dense", "spardl")]
    return Match(
        **{"configs": configs, "rivals": RIVALS, "densities": (0.02,), "repetitions": 3, "warmup": 1, **changes}
    )


def played(rank: int, workers: int, changes: dict[str, Any]) -> list[dict[str, Any]]:
    turns: list[tuple[int, int]] = []
    reports = Bench(match(**changes)).measure(vector_of_length(20_000), lambda *turn: turns.append(turn))
    assert turns == [(turn, 4) for turn in range(1, 5)]
    return [report.to_dict() for report in reports]


def test_everybody_takes_part_with_a_limit_beside_the_figure() -> None:
    """The records of one match: who, how long, against dense, and against what is possible."""
    first, second = on_processes(2, played, {"rate": 25e6})
    assert [record["method"] for record in first] == ["dense", "spardl", *RIVALS]
    for mine, theirs in zip(first, second, strict=True):
        assert mine["median_s"] == theirs["median_s"]
        assert mine["times_limit"] == pytest.approx(mine["median_s"] / mine["limit_s"])
        parts = mine["limit_network_s"] + mine["limit_latency_s"] + mine["limit_memory_s"]
        assert mine["limit_s"] == pytest.approx(parts)
        assert mine["limit_memory_s"] > 0
    dense, sparse = first[:2]
    assert dense["limit_network_s"] == pytest.approx(80_000 / 25e6)
    assert sparse["limit_network_s"] == pytest.approx(sparse_bytes(400, 20_000, "bf16") / 25e6)
    assert sparse["bytes_sent"] / 25e6 > sparse["limit_network_s"]
    assert sparse["seconds_selecting"] > 0 and sparse["seconds_transferring"] > 0


def test_latency_is_waited_for_by_everybody() -> None:
    """Each takes at least as long as the rounds that it counts, and no limit lies below one message."""
    (first, _) = on_processes(2, played, {"latency": 0.01})
    for record in first:
        assert record["median_s"] >= 0.01 * record["rounds"], record["method"]
        assert record["limit_latency_s"] == pytest.approx(0.01)
    assert {record["method"]: record["rounds"] for record in first} == {
        "dense": 2,
        "spardl": 1,
        "fp16": 2,
        "powersgd-1": 6,
        "powersgd-4": 6,
        "handwritten-topk": 2,
    }


def made(rank: int, workers: int) -> list[Tensor]:
    gradients = Gradients(1000, seed=0)
    return [gradients.next().clone() for _ in range(3)]


def test_gradients_differ_from_turn_to_turn_and_from_rank_to_rank() -> None:
    """And look like normal numbers."""
    found = [gradient for rank in on_processes(2, made) for gradient in rank]
    for position, one in enumerate(found):
        assert one.abs().max() < 6 and 0.8 < one.std() < 1.3
        assert not any(torch.equal(one, other) for other in found[:position])


def test_an_unknown_peer_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean powersgd-4"):
        match(rivals=["powersgd4"])
