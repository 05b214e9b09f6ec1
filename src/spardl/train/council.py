"""How ranks agree on what only some of them know: that a signal came, or that it is time to save.

Ranks step together, so a decision must fall at the same step on all of them. They meet every so many steps, in one
all-reduce of three numbers; the last of these is how long steps take, and fixes the step of the next meeting, so that
meetings are a fraction of a second apart and cost nothing that can be measured.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

PAUSE_S = 0.25
LONGEST_PAUSE = 1000  # in steps


@dataclass(frozen=True)
class Decision:
    """`stop` is the signal that asks for it, or 0."""

    stop: int = 0
    save: bool = False


class Council:
    """One rank's seat. `asked` returns the number of a signal that has come to this rank, or 0."""

    def __init__(self, asked: Callable[[], int], save_every_s: float | None) -> None:
        self._asked = asked
        self._save_every = save_every_s
        self._next = 0
        self._before: tuple[int, float] | None = None
        self.note_save()

    def note_save(self) -> None:
        """The time to the next save counts from now."""
        self._saved = time.monotonic()

    def decide(self, step: int) -> Decision:
        """Whether all ranks stop or save after this step. Collective: every rank asks after every step."""
        if step < self._next:
            return Decision()
        now = time.monotonic()
        due = self._save_every is not None and now - self._saved >= self._save_every
        ballot = torch.tensor([self._asked(), due, self._seconds_per_step(step, now)], dtype=torch.float64)
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX)
        stop, save, seconds = ballot.tolist()
        self._next = step + (max(1, min(LONGEST_PAUSE, int(PAUSE_S / seconds))) if seconds > 0 else 1)
        return Decision(int(stop), bool(save))

    def _seconds_per_step(self, step: int, now: float) -> float:
        before, self._before = self._before, (step, now)
        return (now - before[1]) / (step - before[0]) if before is not None and step > before[0] else 0.0
