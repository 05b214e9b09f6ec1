"""The learning rate is a function of the step."""

from typing import Any

import pytest
import torch
from torch import nn

from spardl.train.schedule import LearningRate
from spardl.train.settings import TrainSettings

STEPS = 10


def rates(workers: int = 4, **settings: Any) -> list[float]:
    """One per step of ten epochs with ten steps each."""
    rate = LearningRate(TrainSettings(epochs=10, batch_size=8, lr=0.5, **settings), STEPS, workers)
    return [rate.at(step) for step in range(10 * STEPS)]


def test_the_cosine_is_torchs() -> None:
    """Half a wave from the highest rate to nothing, over the whole run."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * STEPS)
    for rate in rates(schedule="cosine"):
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedule.step()


def test_the_warm_up_rises_from_one_workers_share() -> None:
    """Linear over its epochs, from the rate over the number of workers, as SparDL and OMGS have it."""
    found = rates(schedule="constant", warmup=2)
    assert found[0] == 0.5 / 4
    assert found[10] == pytest.approx((0.5 / 4 + 0.5) / 2)
    assert found[20:] == [0.5] * 80


def test_the_warm_up_may_start_elsewhere() -> None:
    """At nothing, as BERT has it; alone, a worker needs that said."""
    assert rates(schedule="constant", warmup=2, warmup_start=0.0)[0] == 0.0
    assert rates(workers=1, schedule="constant", warmup=2)[0] == 0.5


def test_milestones_multiply() -> None:
    """Each by the factor, from its epoch on, in the middle of one too; those beyond the end do not matter."""
    found = rates(schedule="milestones", milestones=(4, 6.5, 90))
    assert found[39:41] == [0.5, pytest.approx(0.05)]
    assert found[64:66] == [pytest.approx(0.05), pytest.approx(0.005)]
    assert found[-1] == pytest.approx(0.005)


def test_linear_falls_to_nothing() -> None:
    """In a straight line, once it is warm."""
    found = rates(schedule="linear", warmup=5)
    assert found[50] == 0.5 and found[75] == pytest.approx(0.25) and found[-1] == pytest.approx(0.01)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_may_end_above_nothing_and_before_the_last_epoch(schedule: str) -> None:
    """At its floor, in a step of its own, where it stays."""
    found = rates(schedule=schedule, floor=0.1, floor_step=60, warmup_steps=20)
    assert found[20] == 0.5 and found[40] == pytest.approx(0.5 * (0.1 + 0.9 / 2))
    assert found[60:] == [pytest.approx(0.05)] * 40
    assert found == sorted(found[:21]) + sorted(found[21:], reverse=True)


def test_a_warm_up_may_be_given_in_steps() -> None:
    """Linear over so many of them; longer than the run, it is all that there is."""
    assert rates(schedule="constant", warmup_steps=20)[10] == pytest.approx((0.5 / 4 + 0.5) / 2)
    assert rates(warmup_steps=200, warmup_start=0.0)[-1] == pytest.approx(0.5 * 99 / 200)


def test_a_rate_for_another_batch_is_scaled() -> None:
    """Four workers with eight examples each are a quarter of 128."""
    assert rates(schedule="constant", reference_batch=128)[0] == pytest.approx(0.125)
    assert rates(schedule="constant", reference_batch=128, accumulate=4)[0] == pytest.approx(0.5)
