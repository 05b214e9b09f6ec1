"""Whole methods on a device that is not the CPU: nothing touches its memory unseen, and results have the same bits."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from clusters import Cluster
from far import FAR, UPLOADS, WAITS, FarCluster, HostTouch, Race, far, near
from spardl.bench.gpu import check_bits
from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig
from spardl.host import quotient
from spardl.memory.velocity import Momentum
from spardl.sync.plan import Member, plan_group

ELEMENTS = 1003
FORMATS = ("bf16", "fp32", "fp16", "int8", "int4", "int2", "int1")
# Bf16, the default, is what transport/nccl_cases.py runs every method with.
pairwise = [("spardl", "bf16"), ("spardl", "int8"), *zip(sorted(METHODS), itertools.cycle(FORMATS[1:]), strict=False)]


def steps(kind: type[Cluster], config: SyncConfig, workers: int) -> list[torch.Tensor]:
    """Results of two steps, and the residuals after them."""
    generator = torch.Generator().manual_seed(5)
    cluster = kind(workers, ELEMENTS, config)
    found = []
    for _ in range(2):
        found += cluster.step([torch.randn(ELEMENTS, generator=generator) ** 3 for _ in range(workers)])
    return found + cluster.residuals()


def same(config: SyncConfig, workers: int) -> bool:
    pairs = zip(steps(FarCluster, config, workers), steps(Cluster, config, workers), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("method", "values"), pairwise)
def test_every_method_and_format_runs_on_a_device_and_gives_the_same_bits(method: str, values: str) -> None:
    """Each method with some format and each format with some method; all pairs where it may take long."""
    assert same(SyncConfig(method=method, density=0.05, values=values), 3)


@pytest.mark.slow
@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_all_formats_of_all_methods_run_on_a_device_and_give_the_same_bits(method: str, values: str) -> None:
    assert same(SyncConfig(method=method, density=0.05, values=values), 4)


def plan_of(config: SyncConfig, sizes: list[int], workers: int, groups: int = 1) -> list[Any]:
    """Tensors of these sizes, in so many groups of equally many."""
    members = [Member(f"tensor {i}", size) for i, size in enumerate(sizes)]
    each = len(members) // groups
    return [plan_group(replace(config, dense_below=0), members[i * each :][:each], workers) for i in range(groups)]


def waits_of_steps(
    workers: int, tensors: int = 1, groups: int = 1, steps: int = 1, *, skips: bool = False, **settings: Any
) -> list[int]:
    """How often a rank's host waits in each of some steps; one of them may wait once more than the others."""
    config = SyncConfig(**{"density": 0.05, **settings})
    sizes = [240 // tensors] * tensors
    cluster = FarCluster(workers, sum(sizes), config, plans=plan_of(config, sizes, workers, groups))
    found = []
    for _ in range(steps):
        given = [
            {
                f"tensor {i}": far(torch.randn(size, generator=torch.Generator().manual_seed(i + rank)))
                for i, size in enumerate(sizes)
            }
            for rank in range(workers)
        ]
        WAITS.clear()
        UPLOADS.clear()
        cluster.step_all(given, skips=skips)
        found.append(-(-WAITS.total() // workers))
    return found


# Methods that count what exceeds a threshold or lies in a region, in their first step and in others.
COUNTING = {"deft": [3, 3], "exdyna": [3, 2], "micro": [3, 2], "oktopk": [5, 4], "topkdsa": [3, 3]}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_host_waits_as_often_whatever_the_number_of_groups(method: str) -> None:
    """Once, if nothing has to be counted: all that it wants to know, it asks at the end, of all groups together."""
    expected = COUNTING.get(method, [1])
    assert waits_of_steps(2, 3, groups=3, method=method, steps=len(expected)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "groups"), [(2, 1), (4, 1), (2, 16), (5, 8)])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_neither_workers_nor_groups_make_the_host_wait_more_often(method: str, workers: int, groups: int) -> None:
    expected = COUNTING.get(method, [1])
    assert waits_of_steps(workers, 16, groups=groups, method=method, steps=len(expected)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"teams": 2, "gather": "recursive", "values": "fp32"},
        {"teams": 4, "gather": "bruck", "indices": "raw"},
        {"selection": "eager", "teams": 1, "values": "int8"},
        {"residuals": "return", "indices": "rice"},
        {"residuals": "partial"},
        {"residuals": "local"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_host_waits_once_whatever_is_gathered_and_rounded(settings: dict[str, Any]) -> None:
    """Neither rounds and blocks count, nor tensors."""
    assert waits_of_steps(4, 2, **settings) == [1]


def test_ranks_agree_on_unused_parameters_of_all_groups_at_once() -> None:
    assert waits_of_steps(2, 3, groups=3, skips=True) == [2]


def test_what_is_copied_to_the_device_does_not_grow_with_entries() -> None:
    """Numbers per block and per tensor, and no position."""
    copied = []
    for density in (0.02, 0.5):
        waits_of_steps(2, 2, density=density)
        copied.append(UPLOADS.total())
    assert copied[0] == copied[1] < 2000


def test_momentum_before_the_selection_runs_on_a_device() -> None:
    """Two steps with velocities, in two tensors: the same bits."""
    config = SyncConfig(density=0.05)
    sizes = [400, 300]
    found = []
    for kind, up in ((FarCluster, far), (Cluster, lambda tensor: tensor)):
        cluster = kind(2, sum(sizes), config, momentum=True)
        for sync in cluster.ranks:
            sync.regroup(plan_of(config, sizes, 2))
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            given = [
                {f"tensor {i}": up(torch.randn(size, generator=generator)) for i, size in enumerate(sizes)}
                for _ in range(2)
            ]
            rule = {
                f"tensor {i}": Momentum(up(torch.ones(size)), 0.9, 1e-4, nesterov=True) for i, size in enumerate(sizes)
            }
            found.append([near(tensor) for each in cluster.step_all(given, [rule, rule]) for tensor in each.values()])
        found.append(cluster.residuals())
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_gradient_that_is_not_finite_rolls_back_on_a_device() -> None:
    config = SyncConfig(density=0.05)
    cluster = FarCluster(3, ELEMENTS, config)
    good = [torch.randn(ELEMENTS) for _ in range(3)]
    cluster.step(good)
    before = cluster.residuals()
    bad = [each.clone() for each in good]
    bad[2][5] = torch.inf
    assert all(result.isnan().all() for result in cluster.step(bad))
    assert all(torch.equal(one, other) for one, other in zip(before, cluster.residuals(), strict=True))


def test_the_script_for_gpus_finds_the_same_bits_on_the_device_of_the_tests() -> None:
    found = check_bits(FAR)
    assert len(found) == 10 and all(found.values()), found


@pytest.mark.parametrize(
    "touch",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[0].item(),
        lambda tensor: bool(tensor.any()),
        lambda tensor: tensor + torch.ones(3),
        lambda tensor: tensor[torch.tensor([1])],
        lambda tensor: torch.ones(3).to(FAR),
    ],
)
def test_the_device_notices_whoever_touches_it_unseen(touch: Any) -> None:
    with pytest.raises((HostTouch, RuntimeError)):
        touch(far(torch.ones(3)))


def test_the_device_notices_what_is_used_in_another_stream_too_early() -> None:
    streams = torch.get_device_module(FAR)
    beside, tensor = streams.Stream(FAR), torch.zeros(4, device=FAR)
    with streams.stream(beside), pytest.raises(Race, match="read too early"):
        tensor + 1
    beside.wait_event(streams.current_stream(FAR).record_event())
    with streams.stream(beside):
        twice = tensor * 2
    with pytest.raises(Race, match="written too early"):  # it may still be read
        tensor.zero_()
    with pytest.raises(Race, match="read too early"):
        twice.cpu()
    streams.current_stream(FAR).wait_event(beside.record_event())
    assert not tensor.zero_().cpu().any() and not twice.cpu().any()


def test_the_device_divides_by_numbers_of_the_host_as_cuda_does() -> None:
    values = torch.arange(1.0, 200.0)
    assert not torch.equal(near(far(values) / 127), values / 127)
    assert torch.equal(near(quotient(far(values), 127)), values / 127)


def test_the_device_counts_waits() -> None:
    WAITS.clear()
    tensor = torch.zeros(4, device=FAR)
    tensor[1:3] += 1
    assert tensor.cpu().tolist() == [0, 1, 1, 0]
    assert tensor.nonzero().shape == (2, 1) and tensor[tensor > 0].numel() == 2
    assert dict(WAITS) == {"read": 1, "shape": 2}
