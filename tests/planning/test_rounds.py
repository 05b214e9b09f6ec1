"""Turns of a contest: close rivals get more of them, all in the time that there is."""

import itertools
from collections import Counter

import pytest

from spardl.config import SyncConfig
from spardl.planning.budget import Budget
from spardl.planning.candidates import Candidate
from spardl.planning.rounds import ENOUGH, SETTLING, Rounds, counted_steps, finalists

DENSE = Candidate(SyncConfig(method="dense", density=1.0))
METHODS = ("topka", "gtopk", "spardl", "deft")
TOPKA, GTOPK, SPARDL, DEFT = (Candidate(SyncConfig(method=method)) for method in METHODS)


class Clock:
    """One that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def alone(text: str) -> list[str]:
    return [text]


def hold(predicted, real, seconds):
    """Whose turns there were, how many seconds they took, and what was measured."""
    clock, turns = Clock(), []
    budget, rounds = Budget(seconds, clock), Rounds(predicted)
    begun = clock.now
    while turn := rounds.next(budget.left(alone)):
        clock.now += (turn.settling + turn.counted) * real[turn.candidate]
        rounds.note(turn.candidate, [real[turn.candidate]] * turn.counted)
        turns.append(turn)
    return turns, clock.now - begun, rounds.measured


@pytest.mark.parametrize("step", [0.001, 0.015, 0.06, 0.25, 0.9, 3.0])
@pytest.mark.parametrize("seconds", [-1.0, 0.5, 5.0, 14.0])
def test_a_contest_ends_in_time_whatever_a_step_takes(step: float, seconds: float) -> None:
    steps = {DENSE: 3 * step, TOPKA: step, GTOPK: 1.05 * step, SPARDL: 1.02 * step}
    _, taken, measured = hold(steps, steps, seconds)
    assert taken <= max(0.0, seconds)
    assert set(measured) <= set(steps)


def test_a_prediction_that_was_too_low_costs_no_more_than_the_turn_that_shows_it() -> None:
    predicted = {TOPKA: 0.1, GTOPK: 0.1}
    real = {TOPKA: 0.5, GTOPK: 0.5}
    _, taken, _ = hold(predicted, real, 4.0)
    assert taken <= 4.0 + 0.5 * (SETTLING + counted_steps(0.1))


def test_ranks_that_see_less_time_left_count() -> None:
    clock = Clock()
    budget = Budget(25.0, clock)
    clock.now += 10.0
    assert budget.left(lambda text: [text, "3.5"]) == 3.5
    assert budget.left(alone) == pytest.approx(15.0)


def test_close_rivals_take_turns_until_there_are_enough_steps_and_others_drop_out() -> None:
    steps = {DENSE: 0.06, TOPKA: 0.016, GTOPK: 0.015, SPARDL: 0.019, DEFT: 0.030}
    turns, _, measured = hold(steps, steps, 100.0)
    counted = Counter()
    for turn in turns:
        counted[turn.candidate] += turn.counted
    assert counted[TOPKA] >= ENOUGH and counted[GTOPK] >= ENOUGH
    assert counted[SPARDL] == 2 * counted_steps(0.019) and counted[DEFT] == counted_steps(0.030)
    assert [turn.candidate for turn in turns].count(DENSE) == 1 and turns[0].candidate == DENSE
    assert all(a.candidate != b.candidate for a, b in itertools.pairwise(turns))
    assert [turn.candidate for turn in turns[5:8]] == [GTOPK, TOPKA, SPARDL]
    assert measured == steps


def test_dense_has_another_turn_at_the_end_where_it_is_close_and_one_step_more_to_settle() -> None:
    steps = {DENSE: 0.016, TOPKA: 0.015, GTOPK: 0.019}
    turns, _, _ = hold(steps, steps, 100.0)
    assert [turn.candidate for turn in turns] == [DENSE, TOPKA, GTOPK, TOPKA, GTOPK, DENSE]
    assert turns[-1].settling == turns[0].settling + 1


def test_more_take_part_where_steps_are_short() -> None:
    assert finalists(0.015) > finalists(0.06) > finalists(0.5)
