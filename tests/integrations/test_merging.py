"""`merge` profiles the running model, plans its groups, and changes over to them without losing a bit."""

import copy
import math
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from spardl.errors import ConfigError
from spardl.integrations import arranger
from spardl.planning.probe import REPEATS, measure
from spardl.transport.choice import transport_named
from training import EXACT, all_equal, loss_of, lost_in_a_step, mlp, residuals_of, sgd, train, weights_of

PLANNED_AFTER = 1 + arranger.WARM_UP + arranger.MEASURED  # steps


def merged_run(rank, workers, settings):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=settings.pop("bucket_cap_mb", 25))
    optimizer = sgd(model, momentum=0.9)
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, **{**EXACT, **settings})
    train(model, optimizer, range(PLANNED_AFTER - 1))
    assert sync.merging is None
    before = residuals_of(sync)
    train(model, optimizer, range(PLANNED_AFTER - 1, PLANNED_AFTER))
    assert sync.merging is not None
    train(model, optimizer, range(PLANNED_AFTER, PLANNED_AFTER + 10))
    groups = sync.state_dict()["groups"]
    return weights_of(model), groups, sync.merging.after.groups, len(before), sync.stats().total.steps


def some(*names: str, slow: tuple[str, ...]) -> list[Any]:
    """Each takes seconds, and those that are marked differ in arithmetic that other tests look at."""
    return [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.mark.parametrize("merge", some("exact", slow=("layer", "single", "omgs", "mgwfbp", "size:1000")))
def test_every_planner_gives_groups_that_all_ranks_train_with(merge: str) -> None:
    outcomes = on_processes(3, merged_run, {"merge": merge})
    assert all_equal(weights for weights, *_ in outcomes)
    for _, groups, planned, parameters, steps in outcomes:
        assert groups == [list(group) for group in planned]
        assert sorted(name for group in groups for name in group) == sorted(
            name for name, _ in mlp().named_parameters()
        )
        assert steps == PLANNED_AFTER + 10 and parameters == 6
    assert len(outcomes[0][1]) == {"layer": 6, "single": 1}.get(merge, len(outcomes[0][1]))


@pytest.mark.parametrize("method", some("exdyna", slow=("oktopk", "topka", "deft", "gtopk")))
def test_merging_composes_with_other_methods(method: str) -> None:
    outcomes = on_processes(3, merged_run, {"merge": "layer", "method": method})
    assert all_equal(weights for weights, *_ in outcomes)


@pytest.mark.parametrize("buckets", [25, 0.002])
def test_small_buckets_change_nothing(buckets: float) -> None:
    """Whether DDP delivers in one bucket or in many, groups start when their gradients are there."""
    outcomes = on_processes(2, merged_run, {"merge": "layer", "bucket_cap_mb": buckets})
    assert all_equal(weights for weights, *_ in outcomes)


def change_over(rank, workers):
    """Residuals around the step that plans, and what is lost in the steps after it."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=False, density=0.05, merge="layer", **EXACT)
    train(model, optimizer, range(PLANNED_AFTER))
    before = copy.deepcopy(residuals_of(sync))
    sync.session.regroup(sync.plan[::-1])
    moved = residuals_of(sync)
    same = all(torch.equal(before[name], moved[name]) for name in before)
    sync.session.regroup(sync.plan[::-1])
    return same, max(lost_in_a_step(model, sync, lambda m: loss_of(m, rank, 50)) for _ in range(3))


def test_residuals_move_bit_for_bit_and_nothing_is_lost_afterwards() -> None:
    for same, lost in on_processes(3, change_over):
        assert same and lost < 1e-6


def with_and_without_merging(rank, workers):
    """A dense run, grouped by the planner and not: only the order of messages differs."""
    weights = []
    for merge in (None, "layer"):
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model, momentum=0.9)
        spardl.attach(model, optimizer=optimizer, method="dense", merge=merge)
        train(model, optimizer, range(PLANNED_AFTER + 5))
        weights.append(weights_of(model))
    return weights


def test_profiling_does_not_disturb_training() -> None:
    """With dense groups the weights are those of a run that was never profiled."""
    for plain, merged in on_processes(2, with_and_without_merging):
        torch.testing.assert_close(plain, merged, rtol=1e-6, atol=1e-7)


def accumulate(rank, workers):
    """Micro-batches under no_sync neither count as steps nor start groups."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=False, density=0.05, merge="layer", **EXACT)
    for step in range(PLANNED_AFTER + 4):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 2 * step).backward()
        loss_of(model, rank, 2 * step + 1).backward()
        optimizer.step()
    return weights_of(model), sync.stats().total.steps


def test_gradient_accumulation_goes_together_with_early_groups() -> None:
    outcomes = on_processes(2, accumulate)
    assert all_equal(weights for weights, _ in outcomes)
    assert [steps for _, steps in outcomes] == [PLANNED_AFTER + 4] * 2


def resume(rank, workers):
    def start():
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model, momentum=0.9)
        return model, optimizer, spardl.attach(model, optimizer=optimizer, density=0.05, merge="layer", **EXACT)

    model, optimizer, sync = start()
    train(model, optimizer, range(PLANNED_AFTER + 3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
    train(model, optimizer, range(20, 25))
    other, other_optimizer, other_sync = start()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    other_sync.load_state_dict(saved[2])
    train(other, other_optimizer, range(20, 25))
    return weights_of(model), weights_of(other)


def test_a_plan_is_part_of_the_state() -> None:
    """A run that goes on from a checkpoint uses the groups it had, and ends with the same bits."""
    for went_on, resumed in on_processes(2, resume):
        assert torch.equal(went_on, resumed)


def adapt(rank, workers):
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model, momentum=0.9)
    settings = {**EXACT, "merge": "layer", "density_range": (0.01, 0.5), "diagnose_every": 2}
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, **settings)
    train(model, optimizer, range(PLANNED_AFTER + 6))
    return weights_of(model), sync.merging.densities, [group.delta for group in sync.stats().groups]


@pytest.mark.slow  # three ranks profile, plan and adapt
def test_lags_gives_every_group_a_density_of_its_own() -> None:
    """Between floor and ceiling, or dense; the same on all ranks; and the delta of sparse groups is known."""
    outcomes = on_processes(3, adapt)
    assert all_equal(weights for weights, *_ in outcomes)
    assert len({densities for _, densities, _ in outcomes}) == 1
    for density, delta in zip(outcomes[0][1], outcomes[0][2], strict=True):
        assert 0.01 <= density <= 0.5 or density == 1.0
        # Which groups are sparse, and how sparse, hangs on what was timed; what is left may be more than chance leaves.
        assert delta is None if density == 1.0 else 0 <= delta < math.inf


def early_starts(rank, workers):
    """How many groups had started when DDP delivered its one bucket, in the last step."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=False, density=0.05, merge="layer", **EXACT)
    started = []
    submit = sync.submit
    sync.submit = lambda bucket: (started.append(len(sync._arrived)), submit(bucket))[1]
    train(model, optimizer, range(PLANNED_AFTER + 3))
    return started[-1]


def test_groups_start_before_their_bucket_is_full() -> None:
    """All but the last gradient's group, which lands with the bucket itself."""
    assert on_processes(2, early_starts) == [5, 5]


def probe(rank, workers, momentum, cores=2):
    os.sched_getaffinity = lambda _: set(range(cores))  # of a process that is over soon
    transport = transport_named("auto", None, timeout=30, device="cpu")
    before, drawn = transport.traffic.bytes_sent, torch.get_rng_state()
    costs = measure(spardl.SyncConfig(density=0.1), transport, 50_000, momentum=momentum)
    assert torch.equal(torch.get_rng_state(), drawn), "training would draw other numbers than without the probe"
    return costs, transport.traffic.bytes_sent - before


@pytest.mark.parametrize(("cores", "crowded"), [(3, True), (4, False)])
def test_backward_stands_still_for_groups_where_ranks_have_less_than_two_cores(cores: int, crowded: bool) -> None:
    """There planners reckon with what a group computes, dense ones too, and exchanges are timed with work beside."""
    (costs, sent), _ = on_processes(2, probe, False, cores)
    model = costs.model()
    assert costs.crowded == crowded
    assert model.stall(20_000) == (costs.selection(20_000) if crowded else 0)
    assert model.stall(100) == (costs.dense_work(100) if crowded else 0)
    once = sum(4 * size for size in costs.dense.elements) * (1 + REPEATS)
    assert (sent > 2 * once) == crowded, "timed twice, alone and beside work, or once"


@pytest.mark.parametrize("momentum", [False, True])
def test_costs_are_timed_on_real_messages(momentum: bool) -> None:
    """The largest probe alone sends a tenth of 50,000 entries, every time; all ranks get the same costs."""
    outcomes = on_processes(2, probe, momentum)
    assert len({costs for costs, _ in outcomes}) == 1
    dense = sum(4 * size for size in outcomes[0][0].dense.elements) * (1 + REPEATS)
    assert all(sent > dense + 5_000 * 2 * (1 + REPEATS) for _, sent in outcomes)


class Shared(nn.Module):
    """Adds a parameter as it is, so that autograd may hand out one gradient's memory twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 8)
        self.offset = nn.Parameter(torch.zeros(64))
        self.last = nn.Linear(8, 5)

    def forward(self, inputs):
        return self.last(self.first(inputs) + self.offset.view(8, 8))


def shared_memory(rank, workers):
    torch.manual_seed(0)
    model = DistributedDataParallel(Shared())
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=False, density=0.05, groups=1, **EXACT)
    train(model, optimizer, range(5))
    return max(lost_in_a_step(model, sync, lambda m: loss_of(m, rank, 50)) for _ in range(3))


def test_gradients_that_share_memory_with_backward_are_left_alone() -> None:
    """A group that starts early works on DDP's copy: what backward still needs is not touched."""
    assert all(lost < 1e-6 for lost in on_processes(2, shared_memory))


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        spardl.SyncConfig(merge="exact", groups="bucket")
    with pytest.raises(ConfigError, match='add merge="exact"'):
        spardl.SyncConfig(density_range=(0.001, 0.1))
    with pytest.raises(ConfigError, match="Did you mean exact"):
        spardl.SyncConfig(merge="exakt")
    with pytest.raises(ConfigError, match="swap them"):
        spardl.SyncConfig(merge="exact", density_range=(0.2, 0.1))
    with pytest.raises(ConfigError, match="names no size"):
        spardl.SyncConfig(merge="size:0")
