"""Rounds of a contest: who trains the next few steps, so that close rivals are told apart and the time is kept.

Turns are short and many, so that a machine's good and bad seconds fall to all. Who is clearly slower drops out, and
those that are close go on. Arithmetic only: all ranks feed in the same numbers and decide alike.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spardl.planning.candidates import Candidate

SETTLING = 2  # steps of a turn that do not count
TURN_S = 0.15  # that those which do are to take
LEAST_COUNTED, MOST_COUNTED = 3, 10
DENSE_TURNS = 4  # that dense has in one go, where its steps are short
ENOUGH = 100  # counted steps of one candidate
CLOSE, FAR = 1.15, 1.3  # times the best: worth a closer look, and not even worth a second one
ROUND_S = 1.5  # that a round is to take
LEAST_FINALISTS, MOST_FINALISTS = 4, 6  # beside dense


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps of one candidate: first those that do not count, then those that do."""

    candidate: Candidate
    settling: int
    counted: int


def finalists(step: float) -> int:
    """How many take part beside dense, where a step takes so many seconds: more of short ones, which are cheap."""
    fitting = ROUND_S / ((SETTLING + counted_steps(step)) * max(step, 1e-6))
    return int(max(LEAST_FINALISTS, min(MOST_FINALISTS, fitting)))


def counted_steps(step: float, turns: int = 1) -> int:
    """Steps of so many seconds that count in a turn, or in several turns in one go."""
    return max(LEAST_COUNTED, min(turns * MOST_COUNTED, round(turns * TURN_S / max(step, 1e-6))))


class Rounds:
    """Turns of some candidates, of which predicted steps are given. `taken` are the steps that counted, so far.

    Dense comes first, and once more at the end if that could change anything: to and from it the model changes over,
    which takes longer than from one sparse way to another.
    """

    def __init__(self, predicted: Mapping[Candidate, float]) -> None:
        self.taken: dict[Candidate, list[float]] = {each: [] for each in predicted}
        self._predicted = dict(predicted)
        self._sparse = [each for each in predicted if not each.is_dense]
        self._dense = [each for each in predicted if each.is_dense]
        self._waiting = [*self._dense, *self._sparse]
        self._rounds = 1
        self._is_over = False

    def next(self, left: float) -> Turn | None:
        """Whose turn it is, if that takes no more than the seconds that are left; else it is all over."""
        if not self._waiting:
            self._waiting = self._next_round()
        if not self._waiting:
            return None
        turn = self._turn(self._waiting.pop(0))
        if (turn.settling + turn.counted) * self._step(turn.candidate) > left:
            self._is_over, self._waiting = True, []
            return None
        return turn

    def note(self, candidate: Candidate, steps: Sequence[float]) -> None:
        """Counted steps have taken so long on the slowest rank."""
        self.taken[candidate] += steps

    @property
    def measured(self) -> dict[Candidate, float]:
        """Seconds of a step, of those that had a turn: medians."""
        return {each: statistics.median(steps) for each, steps in self.taken.items() if steps}

    def _step(self, candidate: Candidate) -> float:
        return self.measured.get(candidate, self._predicted[candidate])

    def _turn(self, candidate: Candidate) -> Turn:
        step = self._step(candidate)
        if not candidate.is_dense:
            return Turn(candidate, SETTLING, counted_steps(step))
        # Back from sparse, one step more sends what waits.
        return Turn(candidate, SETTLING + (self._rounds > 1), counted_steps(step, DENSE_TURNS))

    def _next_round(self) -> list[Candidate]:
        if self._is_over:
            return []
        self._rounds += 1
        best = min(map(self._step, self._sparse))
        limit = (FAR if self._rounds == 2 else CLOSE) * best
        # The best first, since time may run out before the last.
        going_on = sorted((each for each in self._sparse if self._step(each) <= limit), key=self._step)
        if len(going_on) > 1 and min(len(self.taken[each]) for each in going_on) < ENOUGH:
            return going_on
        self._is_over = True
        return [each for each in self._dense if best / CLOSE <= self._step(each) <= CLOSE * best]
