"""Checkpoints, in the ways in which people write them.

A file per rank, one file by rank 0 for all, or `torch.distributed.checkpoint`. Promised: resuming equals not having
stopped, bit for bit, whenever the checkpoint was taken; one file for all can also be resumed by another number of
ranks, where what had been waiting is still applied; and a state that is another rank's, another world's or damaged is
refused in a sentence, as is a checkpoint of which a part was forgotten.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import spardl
from processes import on_processes
from scripts.twice import error_of, spardl_warnings
from training import all_equal, loss_of, mlp, residuals_of, total, weights_of

SPARSE: dict[str, Any] = {"density": 0.05, "dense_below": 0, "timeout": 30}


class Training:
    """A script that can save and resume. DDP has several buckets here, which it rebuilds after the first step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        self.sync = spardl.attach(self.model, optimizer=self.optimizer, **settings)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, dist.get_rank(), step).backward()
            self.optimizer.step()

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def resume(self, checkpoint: dict[str, Any]) -> None:
        self.model.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])

    def outcome(self) -> list[Tensor]:
        state = self.sync.state_dict()
        kept = [each for kind in ("residuals", "velocities") for _, each in sorted(state[kind].items())]
        return [weights_of(self.model), *kept]


def same_bits(first: Training, second: Training) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.outcome(), second.outcome(), strict=True))


# --- a file per rank --------------------------------------------------------------------------------------------------


def stop_and_resume(
    rank: int, workers: int, folder: Path, settings: dict[str, Any], stop: int, last: int
) -> tuple[bool, bool, bool]:
    """Whether all bits are those of the run that did not stop; and whether that one has made a plan, and this one."""
    whole = Training({**SPARSE, **settings})
    whole.steps(0, stop)
    torch.save({**whole.checkpoint(), "sync": whole.sync.state_dict()}, folder / f"{rank}.pt")
    whole.steps(stop, last)

    again = Training({**SPARSE, **settings})
    checkpoint = torch.load(folder / f"{rank}.pt", weights_only=True)
    again.resume(checkpoint)
    again.sync.load_state_dict(checkpoint["sync"])
    again.steps(stop, last)
    return same_bits(whole, again), whole.sync.merging is not None, again.sync.merging is not None


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        ({}, 1),
        ({}, 5),
        ({"groups": 1000}, 5),
        ({"groups": "bucket"}, 5),
        pytest.param({"groups": "bucket"}, 1),
        ({"merge": "layer"}, 9),
        pytest.param({"merge": "layer"}, 3),
        ({"method": "exdyna"}, 5),
        ({"method": "oktopk"}, 5),
    ],
    ids=str,
)
def test_resuming_from_a_file_per_rank_is_exact(tmp_path: Path, settings: dict[str, Any], stop: int) -> None:
    """Also after the first step, when DDP is about to rebuild its buckets, and before a plan, made in the eighth."""
    for rank, (same, _, _) in enumerate(on_processes(2, stop_and_resume, tmp_path, settings, stop, 12)):
        assert same, f"rank {rank} has other bits"


def test_a_plan_is_made_in_the_step_in_which_it_would_have_been_made(tmp_path: Path) -> None:
    """Until then all bits are the same. The plan itself depends on times, of which none are the same twice."""
    for found in on_processes(2, stop_and_resume, tmp_path, {"merge": "exact"}, 3, 8):
        assert found == (True, True, True)


def wrong_files(rank: int, workers: int, folder: Path) -> tuple[str, str]:
    """Rank 1 loads the file of rank 0, as every rank does where only rank 0 had saved."""
    training = Training(SPARSE)
    training.steps(0, 3)
    torch.save(training.sync.state_dict(), folder / f"{rank}.pt")
    dist.barrier()
    state = torch.load(folder / "0.pt", weights_only=True)
    return error_of(lambda: training.sync.load_state_dict(state))


def test_the_state_of_another_rank_is_refused(tmp_path: Path) -> None:
    (kind0, _), (kind1, text) = on_processes(2, wrong_files, tmp_path)
    assert (kind0, kind1) == ("", "StateError")
    assert "rank 0" in text
    assert "rank 1" in text


def save_per_rank(rank: int, workers: int, folder: Path) -> None:
    training = Training(SPARSE)
    training.steps(0, 3)
    torch.save(training.sync.state_dict(), folder / f"{rank}.pt")


def load_alone(rank: int, workers: int, folder: Path) -> tuple[str, str]:
    state = torch.load(folder / "0.pt", weights_only=True)
    return error_of(lambda: Training(SPARSE).sync.load_state_dict(state))


def test_the_state_of_one_of_more_ranks_is_refused_with_the_way_out(tmp_path: Path) -> None:
    on_processes(2, save_per_rank, tmp_path)
    ((kind, text),) = on_processes(1, load_alone, tmp_path)
    assert kind == "StateError"
    assert "gathered_state_dict" in text


# --- one file for all -------------------------------------------------------------------------------------------------


def whole_checkpoint(training: Training) -> dict[str, Any]:
    """Collective: of all ranks, and the same on each of them."""
    return {**training.checkpoint(), "sync": training.sync.gathered_state_dict()}


def save_by_rank_0(training: Training, folder: Path) -> None:
    checkpoint = whole_checkpoint(training)
    if dist.get_rank() == 0:
        torch.save(checkpoint, folder / "checkpoint.pt")
    dist.barrier()


def load_everywhere(training: Training, folder: Path) -> None:
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    training.resume(checkpoint)
    training.sync.load_state_dict(checkpoint["sync"])


def save_with_dcp(training: Training, folder: Path) -> None:
    dcp.save(whole_checkpoint(training), checkpoint_id=folder / "checkpoint")


def load_with_dcp(training: Training, folder: Path) -> None:
    checkpoint = whole_checkpoint(training)
    dcp.load(checkpoint, checkpoint_id=folder / "checkpoint")
    training.resume(checkpoint)
    training.sync.load_state_dict(checkpoint["sync"])


WAYS = {
    "rank 0 saves": (save_by_rank_0, load_everywhere),
    "torch.distributed.checkpoint": (save_with_dcp, load_with_dcp),
}


def resume_gathered(rank: int, workers: int, folder: Path, way: str) -> bool:
    save, load = WAYS[way]
    whole = Training(SPARSE)
    whole.steps(0, 5)
    save(whole, folder)
    whole.steps(5, 10)
    again = Training(SPARSE)
    load(again, folder)
    again.steps(5, 10)
    return same_bits(whole, again)


@pytest.mark.parametrize("way", WAYS)
def test_resuming_from_one_file_for_all_is_exact(tmp_path: Path, way: str) -> None:
    """Every rank finds its own part in it."""
    assert on_processes(2, resume_gathered, tmp_path, way) == [True, True]


def mean_residual(sync: spardl.SyncHandle) -> Tensor:
    residuals = torch.cat([each.flatten() for _, each in sorted(residuals_of(sync).items())])
    return total(residuals) / dist.get_world_size()


def save_gathered(rank: int, workers: int, folder: Path) -> Tensor:
    training = Training(SPARSE)
    training.steps(0, 5)
    save_by_rank_0(training, folder)
    return mean_residual(training.sync)


def resume_in_another_world(rank: int, workers: int, folder: Path) -> tuple[Tensor, Tensor]:
    training = Training(SPARSE)
    load_everywhere(training, folder)
    mean = mean_residual(training.sync)
    training.steps(5, 8)
    return mean, weights_of(training.model)


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_ranks_goes_on_with_the_same_mean_residual(tmp_path: Path, workers: int) -> None:
    """Results are means over ranks, so what had been waiting is applied as it would have been."""
    saved, *_ = on_processes(2, save_gathered, tmp_path)
    assert saved.abs().max() > 1e-3
    resumed = on_processes(workers, resume_in_another_world, tmp_path)
    for mean, weights in resumed:
        assert torch.allclose(mean, saved, atol=1e-6)
        assert weights.isfinite().all()
    assert all_equal(weights for _, weights in resumed)


# --- what does not fit ------------------------------------------------------------------------------------------------


def put_nan(state: dict[str, Any]) -> None:
    state["residuals"]["0.weight"][3] = math.nan


def put_infinite_velocity(state: dict[str, Any]) -> None:
    state["velocities"]["2.bias"][0] = math.inf


def move_partition(state: dict[str, Any]) -> None:
    edges = state["methods"][0]["partition"]["edges"]
    edges[1] = edges[-1] * 1000


def load_damaged(rank: int, workers: int, method: str, damage: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
    training = Training({**SPARSE, "method": method})
    training.steps(0, 3)
    state = training.sync.state_dict()
    damage(state)
    other = Training({**SPARSE, "method": method})
    return error_of(lambda: other.sync.load_state_dict(state))


@pytest.mark.parametrize(
    ("method", "damage"),
    [("spardl", put_nan), ("spardl", put_infinite_velocity), ("exdyna", move_partition)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_damaged_state_is_refused(method: str, damage: Callable[[dict[str, Any]], None]) -> None:
    for kind, text in on_processes(2, load_damaged, method, damage):
        assert kind == "StateError", text


def forgetful(rank: int, workers: int, load_sync: str) -> tuple[list[str], list[str]]:
    """Resume model and optimizer; the state of spardl before them, after them, or never."""
    training = Training(SPARSE)
    training.steps(0, 3)
    checkpoint, state = training.checkpoint(), training.sync.state_dict()
    with spardl_warnings() as before:
        again = Training(SPARSE)
        if load_sync == "before":
            again.sync.load_state_dict(state)
        again.resume(checkpoint)
        if load_sync == "after":
            again.sync.load_state_dict(state)
    with spardl_warnings() as at_backward:
        again.steps(3, 6)
    return before, at_backward


def test_forgetting_the_state_of_spardl_is_noticed_at_the_next_backward() -> None:
    for before, at_backward in on_processes(2, forgetful, "never"):
        assert before == []
        assert len(at_backward) == 1
        assert "load_state_dict" in at_backward[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_complete_checkpoint_is_no_reason_to_warn(when: str) -> None:
    assert on_processes(2, forgetful, when) == [([], []), ([], [])]
