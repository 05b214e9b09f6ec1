"""One line on a DDP model: the same training at density 1, the same bits on all ranks, and nothing lost."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from training import (
    EXACT,
    all_equal,
    batch,
    loss_of,
    lost_in_a_step,
    mlp,
    residuals_of,
    sgd,
    total,
    train,
    weights_of,
)

SETTINGS = [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}]
# Small enough that DDP makes several buckets of our small model.
SMALL_BUCKETS = 0.002


def dense_and_sparse(rank: int, workers: int, **settings: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights after training with plain DDP and with spardl, for each kind of optimizer."""
    pairs = []
    for kind in SETTINGS:
        weights = []
        for attached in (False, True):
            model = DistributedDataParallel(mlp())
            optimizer = sgd(model, **kind)
            if attached:
                spardl.attach(model, optimizer=optimizer, **settings)
            train(model, optimizer, range(10))
            weights.append(weights_of(model))
        pairs.append((weights[0], weights[1]))
    return pairs


def at_density_one(rank: int, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return dense_and_sparse(rank, workers, density=1.0)


def test_density_one_trains_like_dense_ddp() -> None:
    """At density 1 every parameter ends where dense DDP takes it; with momentum, decay and Nesterov too."""
    for rank, pairs in enumerate(on_processes(4, at_density_one)):
        for kind, (dense, sparse) in zip(SETTINGS, pairs, strict=True):
            difference = float((dense - sparse).abs().max())
            assert difference < 1e-6, f"rank {rank}, SGD with {kind}: {difference}"


def sparse_run(rank: int, workers: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    model = DistributedDataParallel(mlp())
    start = weights_of(model)
    optimizer = sgd(model, momentum=0.9)
    sync = spardl.attach(model, optimizer=optimizer, density=0.05, dense_below=0)
    train(model, optimizer, range(30))
    return start, weights_of(model), sync.stats().total.density


def test_all_ranks_hold_the_same_bits_after_sparse_training() -> None:
    """At 5 % and with rounded values, 30 steps leave bit-identical parameters everywhere, and they have moved."""
    outcomes = on_processes(4, sparse_run)
    assert all_equal(weights for _, weights, _ in outcomes)
    start, weights, density = outcomes[0]
    assert not torch.equal(start, weights)
    assert density == pytest.approx(0.05, rel=0.02)


def losses_over_a_rebuild(rank: int, workers: int, groups: Any, options: dict[str, Any]) -> tuple[list[float], int]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS, **options)
    sync = spardl.attach(model, optimizer=False, density=0.05, groups=groups, **EXACT)
    lost = [lost_in_a_step(model, sync, lambda m, step=step: loss_of(m, rank, step)) for step in range(7)]
    return lost, len(sync.stats().groups)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize(("groups", "count"), [("model", 1), ("bucket", None), (1000, 3)])
def test_nothing_is_lost_when_ddp_rebuilds_its_buckets(groups: Any, count: int | None, options: dict[str, Any]) -> None:
    """Gradients and residuals that go in come out or stay, in the first steps, whose buckets differ, and after."""
    for lost, made in on_processes(2, losses_over_a_rebuild, groups, options):
        assert max(lost) < 1e-5, f"lost per step: {lost}"
        assert made == count if count else made > 1


def by_hand(rank: int, workers: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same run by attach, by the hook pair, and by the hook in a wrapper that halves the bits."""
    weights = []
    for way in ("attach", "pair", "wrapped"):
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model)
        if way == "attach":
            spardl.attach(model, optimizer=False, density=0.1, **EXACT)
        else:
            state = spardl.SparDLState(model, optimizer=False, density=0.1, **EXACT)
            model.register_comm_hook(state, spardl.spardl_hook if way == "pair" else wrapped_hook())
        train(model, optimizer, range(5))
        weights.append(weights_of(model))
    return weights[0], weights[1], weights[2]


def wrapped_hook() -> Any:
    return fp16_compress_wrapper(spardl.spardl_hook)


def test_the_hook_pair_and_a_compressing_wrapper_do_what_attach_does() -> None:
    """`register_comm_hook(state, spardl_hook)` gives the same bits; inside fp16_compress_wrapper, nearly the same."""
    outcomes = on_processes(2, by_hand)
    for index in range(3):
        assert all_equal(outcome[index] for outcome in outcomes)
    attached, pair, wrapped = outcomes[0]
    assert torch.equal(attached, pair)
    assert not torch.equal(attached, wrapped)
    assert torch.allclose(attached, wrapped, atol=0.02)


def uneven(rank: int, workers: int) -> tuple[torch.Tensor, float]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=False, density=0.1, **EXACT)
    with model.join():
        train(model, optimizer, range(3 + 3 * rank))
    return weights_of(model), sum(float(residual.abs().sum()) for residual in residuals_of(sync).values())


def test_ranks_with_less_data_may_join_early() -> None:
    """Inside DDP's join(), ranks that have run out keep taking part, and all end with the same parameters."""
    (first, kept), (second, _) = on_processes(2, uneven)
    assert torch.equal(first, second)
    assert kept > 0


def with_groups(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("team", "member"))
    ways: dict[str, dict[str, Any]] = {
        "plain": {"teams": 1},
        "group": {"process_group": dist.new_group([0, 1, 2, 3]), "teams": 1},
        "flat mesh": {"process_group": flat, "teams": 1},
        "two teams": {"teams": 2},
        "grid": {"process_group": grid},
        "team size": {"team_size": 2},
        "four teams": {"team_size": 1, "gather": "b"},
    }
    for way, options in ways.items():
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model)
        sync = spardl.attach(model, optimizer=False, density=0.1, **options, **EXACT)
        train(model, optimizer, range(3))
        found[way] = (sync.config.options.teams, sync.stats().total.rounds, weights_of(model))
    return found


def test_groups_meshes_and_team_sizes_say_who_synchronises_with_whom() -> None:
    """A group, a 1-D mesh or none are the same; a 2-D mesh and a team size make teams, as `teams` does."""
    found = on_processes(4, with_groups)
    for way in found[0]:
        assert all_equal(each[way][2] for each in found), f"ranks differ with {way}"
    rounds = {way: (teams, count) for way, (teams, count, _) in found[0].items()}
    assert rounds["plain"] == rounds["group"] == rounds["flat mesh"] == (1, 3 * 4)
    assert rounds["two teams"] == rounds["grid"] == rounds["team size"] == (2, 3 * 3)
    assert rounds["four teams"] == (4, 3 * 2)
    weights = {way: each[2] for way, each in found[0].items()}
    assert all_equal(weights[way] for way in ("plain", "group", "flat mesh"))
    assert all_equal(weights[way] for way in ("two teams", "grid", "team size"))


def two_pairs(rank: int, workers: int) -> tuple[torch.Tensor, int]:
    """Two models, each on two of four ranks: what DDP calls a process group of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(mlp(seed=rank // 2), process_group=pairs[rank // 2])
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=False, density=0.1, **EXACT)
    train(model, optimizer, range(3))
    dist.barrier()  # the store goes with rank 0
    return weights_of(model), sync.stats().total.rounds


def test_ddp_on_a_part_of_the_ranks_synchronises_that_part() -> None:
    """Two pairs train two models side by side, and neither hears of the other."""
    (a, rounds), (b, _), (c, _), (d, _) = on_processes(4, two_pairs)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)
    assert rounds == 3 * 1


def own_group(rank: int, workers: int) -> tuple[int, int]:
    """How many collectives DDP's own group has seen before and after training: its sequence number tells."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = sgd(model)
    spardl.attach(model, optimizer=False, density=0.1, groups="bucket", dense_below=200, timeout=30)
    train(model, optimizer, range(3))
    group = model.process_group
    before = group._get_sequence_number_for_group()
    train(model, optimizer, range(3, 8))
    return before, group._get_sequence_number_for_group()


def test_ddps_own_group_is_never_used() -> None:
    """Our messages and all-reduces travel on a group of our own, so they cannot cross DDP's from another thread."""
    for before, after in on_processes(2, own_group):
        assert after == before


def accumulated(rank: int, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each model's gradients add up to over three steps, and with that what is still kept, over all ranks."""
    whole, pieces = (DistributedDataParallel(mlp()) for _ in range(2))
    syncs = [spardl.attach(model, optimizer=False, density=0.1, **EXACT) for model in (whole, pieces)]
    sent = [torch.zeros(weights_of(whole).numel()) for _ in syncs]
    for step in range(3):
        inputs, labels = batch(rank, step, size=16)
        for model in (whole, pieces):
            model.zero_grad()
        torch.nn.functional.cross_entropy(whole(inputs), labels).backward()
        with pieces.no_sync():
            (torch.nn.functional.cross_entropy(pieces(inputs[:8]), labels[:8]) / 2).backward()
        (torch.nn.functional.cross_entropy(pieces(inputs[8:]), labels[8:]) / 2).backward()
        for out, model in zip(sent, (whole, pieces), strict=True):
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            assert 0 < torch.count_nonzero(gradient) < gradient.numel() / 5
            out += gradient
    kept = [torch.cat([residuals_of(sync)[name] for name, _ in mlp().named_parameters()]) for sync in syncs]
    return [(out, workers * out + total(rest)) for out, rest in zip(sent, kept, strict=True)]


def test_accumulating_under_no_sync_is_one_big_batch() -> None:
    """Two half batches, the first under no_sync, give what one backward over both gives; over steps with residuals.

    Both are rounded differently, so where two entries are nearly alike either may be sent first; none is lost or new.
    """
    for (sent, whole), (also_sent, pieces) in on_processes(2, accumulated):
        assert torch.allclose(whole, pieces, atol=1e-6)
        assert float((sent - also_sent).norm()) < 0.1 * float(sent.norm())
