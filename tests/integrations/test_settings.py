"""Settings of attach and what they do to a step: one worker, clipping, density schedules, statistics, warnings."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from training import EXACT, batch, loss_of, mlp, residuals_of, sgd, total, train, weights_of


def alone_and_idle(rank: int, workers: int) -> dict[str, Any]:
    """What dense DDP and spardl make of one worker, and of gradients that are zero."""
    weights = []
    for attached in (False, True):
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model, momentum=0.9)
        if attached:
            sync = spardl.attach(model, optimizer=optimizer, density=0.01, dense_below=0)
        train(model, optimizer, range(5))
        weights.append(weights_of(model))
    model = DistributedDataParallel(mlp())
    idle = spardl.attach(model, optimizer=False, density=0.01, dense_below=0)
    for _ in range(2):
        model.zero_grad()
        (model(batch(rank, 0)[0]) * 0).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return {
        "difference": float((weights[0] - weights[1]).abs().max()),
        "bytes": sync.stats().total.bytes_sent,
        "zero": not any(each.any() for each in [*gradients, *residuals_of(idle).values()]),
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_one_worker_and_zero_gradients(workers: int) -> None:
    """One worker trains as if alone and sends nothing; all-zero gradients stay zero and leave no residual."""
    for found in on_processes(workers, alone_and_idle):
        assert found["zero"]
        if workers == 1:
            assert found["difference"] < 1e-6
            assert found["bytes"] == 0


def clipped(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = DistributedDataParallel(mlp())
    spardl.attach(model, optimizer=False, density=0.1, **EXACT)
    loss_of(model, rank, 0).backward()
    found["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    found["after"] = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    for clip in (0.02, 1e6):
        model = DistributedDataParallel(mlp())
        spardl.attach(model, optimizer=False, density=1.0, clip_norm=clip)
        loss_of(model, rank, 0).backward()
        found[clip] = torch.cat([p.grad.flatten() for p in model.parameters()])
    module = mlp()
    loss_of(module, rank, 0).backward()
    local = torch.cat([p.grad.flatten() for p in module.parameters()])
    allowed = 0.02 * workers**0.5
    found["expected"] = total(local * min(1.0, allowed / float(local.norm()))) / workers
    found["unclipped"] = total(local) / workers
    return found


def test_clipping_after_backward_and_before_accumulation() -> None:
    """clip_grad_norm_ sees the averaged gradient, the same on all ranks; clip_norm bounds each worker's own."""
    first, second = on_processes(2, clipped)
    assert first["norm"] == second["norm"] > 0.01
    assert first["after"] == pytest.approx(0.01, rel=1e-3)
    assert torch.allclose(first[0.02], first["expected"], atol=1e-7)
    assert torch.allclose(first[1e6], first["unclipped"], atol=1e-6)
    assert float(first[0.02].norm()) < float(first[1e6].norm())


def warming_up(rank: int, workers: int) -> list[int]:
    model = DistributedDataParallel(mlp())
    schedule = spardl.DensitySchedule(0.01, start=0.25, steps=2, dense_steps=2)
    spardl.attach(model, optimizer=False, density=schedule, **EXACT)
    counts = []
    for step in range(6):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        counts.append(sum(int(torch.count_nonzero(p.grad)) for p in model.parameters() if p.grad is not None))
    return counts


def test_density_may_start_dense_and_become_sparse() -> None:
    """Two dense steps, two on the way down, then the target: the gradient has as many entries as the schedule says."""
    elements = 2225
    for counts in on_processes(2, warming_up):
        assert all(count > 0.6 * elements for count in counts[:2]), "ReLU leaves some entries zero even when dense"
        assert counts[2:] == [556, 111, 22, 22]


def measured(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for groups in ("model", 1000):
        model = DistributedDataParallel(mlp())
        sync = spardl.attach(model, optimizer=False, density=0.1, groups=groups, dense_below=500, timeout=30)
        train(model, sgd(model), range(4))
        found[str(groups)] = sync.stats()
    model = DistributedDataParallel(mlp())
    sync = spardl.attach(model, optimizer=False, method="dense", timeout=30)
    train(model, sgd(model), range(4))
    found["dense"] = sync.stats()
    return found


def test_statistics_tell_what_was_sent_and_where_time_went() -> None:
    """Entries, bytes, bits, density and times are what the settings allow, by group and in total."""
    for found in on_processes(2, measured):
        total = found["model"].total
        assert (total.elements, total.steps, total.skipped) == (2225, 4, 0)
        assert total.entries == 4 * 222
        assert total.density == pytest.approx(0.1, rel=0.01)
        # Two workers in two teams: each sends its 222 largest once, and 16-bit values with packed indices.
        assert (total.rounds, total.messages, total.entries_sent) == (4, 4, 4 * 222)
        assert 16 < total.bits_per_entry < 25.5
        assert total.bytes_sent == pytest.approx(total.entries_sent * total.bits_per_entry / 8)
        assert min(total.seconds_selecting, total.seconds_waiting, total.seconds_transferring) >= 0
        assert total.seconds_selecting + total.seconds_waiting + total.seconds_transferring > 0

        grouped = found["1000"]
        assert [group.elements for group in grouped.groups] == [185, 1200, 840]
        assert [group.dense for group in grouped.groups] == [True, False, False]
        assert [round(group.density, 2) for group in grouped.groups] == [1.0, 0.1, 0.1]
        assert grouped.total.bytes_sent == sum(group.bytes_sent for group in grouped.groups)
        assert grouped.total.elements == 2225
        assert grouped.to_dict()["total"]["entries"] == grouped.total.entries

        dense = found["dense"].total
        assert dense.density == 1.0
        assert dense.bits_per_entry == pytest.approx(32)


@pytest.mark.parametrize("settings", [{}, {"update": "local"}, {"when": "step"}], ids=str)
def test_parts_that_nobody_can_tell_from_whole_parameters_are_refused(settings: dict[str, Any]) -> None:
    """Ranks would give each other what are different parts. FSDP1 cannot be made on a CPU, so it is not finished."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(flat)
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    for module, why in ((flat, "FSDP1 keeps flat parts"), (engine, "DeepSpeed cuts up")):
        with pytest.raises(spardl.ConfigError, match=rf"{why}.*fully_shard \(FSDP2\)"):
            spardl.attach(nn.Sequential(module), optimizer=False, **settings)
