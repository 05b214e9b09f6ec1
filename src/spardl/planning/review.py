"""Review: what was predicted against what training takes, and what to do about it. Arithmetic only.

A prediction decides how training begins. Then measured steps decide: where dense and the sparse way could be close,
each has a few steps, and the quicker one stays; a sparse way that wins by little has to win again. Later, a step that
takes much longer or much less than it did means that something has changed, and everything is measured anew. All ranks
feed in the same numbers and decide alike.
"""

import enum
import statistics
from dataclasses import dataclass, field

from spardl.planning.choose import MARGIN

SETTLING = 2  # steps after a change that do not count
MEASURED, MOST_MEASURED = 6, 40  # steps that do: more of short ones, which scatter more
MEASURED_S = 0.6  # that they are to take together
TURNS = 3  # of either way at most, where one does not suffice
CLEAR = 0.8  # of dense's step: a sparse way this quick has won after one turn
LONGEST_RACE = 2 * TURNS * (SETTLING + MOST_MEASURED + 1)  # steps; going back to dense takes one more
FIRST_CHECK, LAST_CHECK = 100, 3200  # steps from one check of a settled choice to the next; it doubles in between
CHANGED = 1.3  # times as long, or as short, as a step was


class Verdict(enum.Enum):
    """What to do now."""

    STAY = "stay"
    SWITCH = "switch"
    SURVEY = "survey"


@dataclass
class Review:
    """Two ways, of which one is in force. `sparse` and `dense` are the predicted seconds of an exchange by each.

    `is_dense` is the one in force. `settled` is what a step took when it was decided, or None before that.
    """

    sparse: float
    dense: float
    is_dense: bool
    settled: float | None = None
    loser: float | None = None  # what a step of the other way took, if there was a race
    _needed: int = MEASURED
    _turns: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # steps, by `is_dense`
    _interval: int = FIRST_CHECK
    _steps: list[float] = field(default_factory=list)
    _ignored: int = 0

    def note(self, seconds: float) -> None:
        """A step has taken so long."""
        if self._ignored < SETTLING:
            self._ignored += 1
        else:
            self._steps.append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether there is something to decide; it depends on the number of steps alone."""
        return len(self._steps) >= (self._needed if self.settled is None else self._interval)

    @property
    def median(self) -> float:
        """Of this rank's steps; all ranks decide by the same mean of these."""
        return statistics.median(self._steps[-MOST_MEASURED:])

    def decide(self, step: float) -> Verdict:
        """What to do, now that a step takes so many seconds on all ranks."""
        if self.settled is None and len(self._steps) < (wanted := steps_of(step)):
            self._needed = wanted
            return Verdict.STAY
        self._steps.clear()
        self._needed = MEASURED
        if self.settled is not None:
            return self._check(step)
        self._turns[self.is_dense].append(step)
        had, rivals = len(self._turns[self.is_dense]), len(self._turns[not self.is_dense])
        if not rivals and not self._may_lose(step):
            self.settled = step
            self._turns[self.is_dense].clear()
            return Verdict.STAY
        if had > rivals:
            self.is_dense, self._ignored = not self.is_dense, 0
            return Verdict.SWITCH
        return self._conclude()

    def _may_lose(self, step: float) -> bool:
        """Whether the other way could be quicker, at best. Dense may hide behind backward, all of it."""
        if self.is_dense:
            return step - self.dense + self.sparse < (1 - MARGIN) * step
        return max(step - self.sparse, self.dense) < step / (1 - MARGIN)

    def _conclude(self) -> Verdict:
        """Both have had as many turns; sparse has to save a twentieth.

        Seconds are good and bad ones for all that runs in them. So a sparse way that has won by little has to win
        again: whoever came last goes first in the next pair of turns, which evens out a machine that slows down.
        """
        dense, sparse = (statistics.median(self._turns[way]) for way in (True, False))
        better = sparse > (1 - MARGIN) * dense
        if not better and sparse > CLEAR * dense and len(self._turns[True]) < TURNS:
            return Verdict.STAY
        self._turns, self._ignored = {True: [], False: []}, 0
        self.settled, self.loser = (dense, sparse) if better else (sparse, dense)
        if better == self.is_dense:
            return Verdict.STAY
        self.is_dense = better
        return Verdict.SWITCH

    def _check(self, step: float) -> Verdict:
        assert self.settled is not None
        self._interval = min(LAST_CHECK, 2 * self._interval)
        lost = self.loser is not None and step > self.loser
        return Verdict.SURVEY if lost or not self.settled / CHANGED <= step <= self.settled * CHANGED else Verdict.STAY


def steps_of(seconds: float) -> int:
    """How many steps of so many seconds are measured."""
    return max(MEASURED, min(MOST_MEASURED, round(MEASURED_S / max(seconds, 1e-6))))
