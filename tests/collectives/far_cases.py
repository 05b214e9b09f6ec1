"""Whole methods on a device that is not the CPU: nothing touches its memory unseen, and results have the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from clusters import Cluster
from far import FAR, UPLOADS, WAITS, FarCluster, HostTouch, far, near
from spardl.bench.gpu import check_bits
from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig
from spardl.memory.velocity import Momentum
from spardl.sync.plan import Member, plan_group

ELEMENTS = 1003
SLOW_FORMATS = ("fp32", "fp16", "int8", "int4", "int1")
FORMATS = ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FORMATS)]


def steps(kind: type[Cluster], config: SyncConfig, workers: int) -> list[torch.Tensor]:
    """Results of a few steps, and the residuals after them."""
    generator = torch.Generator().manual_seed(5)
    cluster = kind(workers, ELEMENTS, config)
    found = []
    for _ in range(3):
        found += cluster.step([torch.randn(ELEMENTS, generator=generator) ** 3 for _ in range(workers)])
    return found + cluster.residuals()


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_and_format_runs_on_a_device_and_gives_the_same_bits(method: str, values: str) -> None:
    config = SyncConfig(method=method, density=0.05, values=values)
    for one, other in zip(steps(FarCluster, config, 4), steps(Cluster, config, 4), strict=True):
        assert torch.equal(one, other)


def plan_of(config: SyncConfig, sizes: list[int], workers: int, groups: int = 1) -> list[Any]:
    """Tensors of these sizes, in so many groups of equally many."""
    members = [Member(f"tensor {i}", size) for i, size in enumerate(sizes)]
    each = len(members) // groups
    return [plan_group(replace(config, dense_below=0), members[i * each :][:each], workers) for i in range(groups)]


def waits_of_a_step(workers: int, tensors: int = 1, groups: int = 1, **settings: Any) -> float:
    """How often each rank's host waits in one step."""
    config = SyncConfig(**{"density": 0.05, **settings})
    sizes = [480 // tensors] * tensors
    cluster = FarCluster(workers, sum(sizes), config, plans=plan_of(config, sizes, workers, groups))
    for _ in range(2):
        given = [
            {
                f"tensor {i}": far(torch.randn(size, generator=torch.Generator().manual_seed(i + rank)))
                for i, size in enumerate(sizes)
            }
            for rank in range(workers)
        ]
        WAITS.clear()
        UPLOADS.clear()
        cluster.step_all(given)
    return WAITS.total() / workers


@pytest.mark.parametrize(("workers", "tensors"), [(2, 1), (4, 12), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_the_host_waits_once_in_a_step(workers: int, tensors: int) -> None:
    """Neither workers, hence rounds and blocks, count, nor tensors: all that it wants to know, it asks at the end."""
    assert waits_of_a_step(workers, tensors, teams=1, values="bf16") == 1


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_the_host_waits_once_whatever_the_number_of_groups(groups: int) -> None:
    assert waits_of_a_step(2, 16, groups) == 1


@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_the_host_waits_once_also_for_values_that_are_rounded_after_the_selection(values: str) -> None:
    assert waits_of_a_step(2, 2, values=values) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"teams": 2, "gather": "recursive"},
        {"teams": 4, "gather": "bruck"},
        {"selection": "eager", "teams": 1},
        {"residuals": "return"},
        {"residuals": "partial"},
        {"residuals": "local"},
        {"method": "gtopk"},
        {"method": "topka"},
        {"method": "topka2"},
        {"method": "chunktopk", "chunk": 40},
        {"method": "dense"},
        {"indices": "raw"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_host_waits_once_whatever_is_gathered(settings: dict[str, Any]) -> None:
    assert waits_of_a_step(4, 2, **settings) == 1


@pytest.mark.parametrize(
    ("method", "most"), [("topkdsa", 14), ("oktopk", 21), ("deft", 8), ("exdyna", 10), ("micro", 10)]
)
def test_what_has_to_be_counted_makes_the_host_wait(method: str, most: int) -> None:
    """Methods whose messages have as many entries as exceed a threshold, or lie in a region: a few times a group."""
    assert 1 < waits_of_a_step(4, 2, method=method) <= most


def test_what_is_copied_to_the_device_does_not_grow_with_entries() -> None:
    """Numbers per block and per tensor, and no position."""
    copied = []
    for density in (0.02, 0.5):
        waits_of_a_step(4, 2, density=density)
        copied.append(UPLOADS.total())
    assert copied[0] == copied[1] < 4000


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
    cluster = FarCluster(4, ELEMENTS, config)
    good = [torch.randn(ELEMENTS) for _ in range(4)]
    cluster.step(good)
    before = cluster.residuals()
    bad = [each.clone() for each in good]
    bad[2][5] = torch.inf
    assert all(result.isnan().all() for result in cluster.step(bad))
    assert all(torch.equal(one, other) for one, other in zip(before, cluster.residuals(), strict=True))


def test_the_script_for_gpus_finds_the_same_bits_on_the_device_of_the_tests() -> None:
    found = check_bits(FAR)
    assert len(found) == 4 and all(found.values())


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


def test_the_device_counts_waits() -> None:
    WAITS.clear()
    tensor = torch.zeros(4, device=FAR)
    tensor[1:3] += 1
    assert tensor.cpu().tolist() == [0, 1, 1, 0]
    assert tensor.nonzero().shape == (2, 1) and tensor[tensor > 0].numel() == 2
    assert dict(WAITS) == {"read": 1, "shape": 2}
