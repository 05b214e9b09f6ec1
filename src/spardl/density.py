"""Density over steps."""

from dataclasses import dataclass, replace

from spardl.choices import is_count, is_number
from spardl.errors import ConfigError


@dataclass(frozen=True)
class DensitySchedule:
    """Density over steps: dense for `dense_steps`, then from `start` down to `target` geometrically over `steps`.

    Args:
        target: the share of entries that a step may send in the end, in (0, 1].
        start: the share at the first step that is not dense.
        steps: how long it takes from `start` to `target`.
        dense_steps: how many steps send everything, before that.
        settled: the density once `target` is reached, if it is another than that, as plans give it to groups; before
            then no less than this is sent.

    Raises:
        ConfigError: a density outside (0, 1], or a number of steps that is none.
    """

    target: float
    start: float = 1.0
    steps: int = 0
    dense_steps: int = 0
    settled: float | None = None

    def __post_init__(self) -> None:
        check_density(self.target)
        check_density(self.start)
        if self.settled is not None:
            check_density(self.settled)
        for steps in (self.steps, self.dense_steps):
            if not is_count(steps):
                raise ConfigError(f"a density schedule cannot last {steps!r} steps; use a whole number from 0 on.")

    @staticmethod
    def of(density: "float | DensitySchedule") -> "DensitySchedule":
        """A constant density as a schedule; a schedule as it is."""
        return density if isinstance(density, DensitySchedule) else DensitySchedule(float(density))

    def settling_at(self, density: float | None) -> "DensitySchedule":
        """This schedule, with another density once it has reached its target."""
        return replace(self, settled=density)

    def at(self, step: int) -> float:
        """The density of step `step`, counted from 0."""
        scheduled = self._scheduled(step)
        if self.settled is None:
            return scheduled
        return max(self.settled, scheduled) if scheduled > self.target else self.settled

    @property
    def final(self) -> float:
        """The density that it ends with."""
        return self.target if self.settled is None else self.settled

    def _scheduled(self, step: int) -> float:
        if step < self.dense_steps:
            return 1.0
        progress = (step - self.dense_steps) / self.steps if self.steps else 1.0
        if progress >= 1.0:
            return self.target
        return float(self.start * (self.target / self.start) ** progress)


def check_density(density: float) -> None:
    """Raise `ConfigError` unless this is a share of entries that can be sent."""
    if not (is_number(density) and 0 < density <= 1):
        raise ConfigError(f"density {density} is outside (0, 1]; 0.01 sends one entry in a hundred, 1 sends all.")
