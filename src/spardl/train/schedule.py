"""The learning rate as a pure function of the step, so that a run that goes on anywhere finds the same. No torch."""

import math
from dataclasses import dataclass

from spardl.train.settings import TrainSettings


@dataclass(frozen=True)
class LearningRate:
    """The rate of any step of a run, counted from 0.

    A warm-up, linear from a share of the rate (one over the workers, where nothing else is said), then the schedule.
    """

    settings: TrainSettings
    steps_per_epoch: int
    workers: int

    def at(self, step: int) -> float:
        return self.highest * self._factor(step)

    @property
    def highest(self) -> float:
        """`lr`, scaled to the examples that a step has (Goyal et al., "Accurate, large minibatch SGD", 2017)."""
        settings = self.settings
        if settings.reference_batch is None:
            return settings.lr
        return settings.lr * settings.batch_size * settings.accumulate * self.workers / settings.reference_batch

    def _factor(self, step: int) -> float:
        settings = self.settings
        warmup = settings.warmup_steps or settings.warmup * self.steps_per_epoch
        if step < warmup:
            start = 1 / self.workers if settings.warmup_start is None else settings.warmup_start
            return start + (1 - start) * step / warmup
        end = settings.floor_step or settings.epochs * self.steps_per_epoch
        progress = min(1.0, (step - warmup) / (end - warmup)) if end > warmup else 1.0
        if settings.schedule == "cosine":
            return settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * progress)) / 2
        if settings.schedule == "linear":
            return settings.floor + (1 - settings.floor) * (1 - progress)
        if settings.schedule == "milestones":
            passed = sum(step >= milestone * self.steps_per_epoch for milestone in settings.milestones)
            return settings.gamma**passed
        return 1.0
