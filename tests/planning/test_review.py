"""Measured steps have the last word: what was predicted is raced against dense where it could lose."""

from spardl.planning.review import (
    CHANGED,
    FIRST_CHECK,
    LONGEST_RACE,
    MEASURED,
    MOST_MEASURED,
    SETTLING,
    Review,
    Verdict,
    steps_of,
)


def after(review: Review, seconds: float, steps: int | None = None) -> Verdict:
    """Steps until it is due, all of them so long, and the verdict."""
    for _ in range(steps or SETTLING + MEASURED):
        review.note(seconds)
    assert review.is_due
    verdict = review.decide(review.median)
    while steps is None and verdict is Verdict.STAY and review.settled is None:  # it wants to see more of them
        review.note(seconds)
        verdict = review.decide(review.median) if review.is_due else verdict
    return verdict


def test_a_clear_winner_is_not_raced() -> None:
    """An exchange by dense alone would take longer than the whole step does now."""
    review = Review(sparse=0.05, dense=1.0, is_dense=False)
    assert after(review, 0.2) is Verdict.STAY and review.settled == 0.2


def test_dense_stays_where_sparse_cannot_save_anything() -> None:
    review = Review(sparse=0.05, dense=0.04, is_dense=True)
    assert after(review, 0.2) is Verdict.STAY and review.is_dense


def test_what_is_close_is_raced_and_the_quicker_one_stays() -> None:
    review = Review(sparse=0.05, dense=0.08, is_dense=False)
    assert after(review, 0.20) is Verdict.SWITCH and review.is_dense
    assert after(review, 0.15) is Verdict.STAY and review.is_dense and review.settled == 0.15


def test_sparse_comes_back_when_it_won_the_race() -> None:
    review = Review(sparse=0.05, dense=0.08, is_dense=False)
    assert after(review, 0.20) is Verdict.SWITCH
    assert after(review, 0.26) is Verdict.SWITCH and not review.is_dense and review.settled == 0.20


def run_race(review: Review, *, dense: float, sparse: float) -> list[bool]:
    """Turns until it is settled, and who had them: True for dense."""
    turns = []
    while review.settled is None:
        turns.append(review.is_dense)
        one_turn(review, dense if review.is_dense else sparse)
    return turns


def one_turn(review: Review, seconds: float) -> Verdict:
    for _ in range(SETTLING + MEASURED):
        review.note(seconds)
    return review.decide(seconds)


def test_a_sparse_way_that_wins_by_little_has_to_win_again() -> None:
    """Whoever came last goes first in the next pair of turns, so that a machine that slows down favours nobody."""
    review = Review(sparse=0.05, dense=0.08, is_dense=False)
    assert run_race(review, dense=0.22, sparse=0.20) == [False, True, True, False, False, True]
    assert not review.is_dense and review.settled == 0.20


def test_one_good_turn_of_a_sparse_way_does_not_make_it_the_winner() -> None:
    """A tenth quicker once, as quick as dense ever after: dense it is."""
    review = Review(sparse=0.05, dense=0.08, is_dense=False)
    assert one_turn(review, 0.20) is Verdict.SWITCH  # sparse
    assert one_turn(review, 0.22) is Verdict.STAY and review.settled is None  # dense: close
    assert one_turn(review, 0.22) is Verdict.SWITCH and not review.is_dense
    assert one_turn(review, 0.23) is Verdict.SWITCH and review.is_dense and review.settled == 0.22


def test_a_race_takes_no_more_steps_than_is_said() -> None:
    review = Review(sparse=0.005, dense=0.008, is_dense=False)
    taken = 0
    while review.settled is None:
        taken += 1
        review.note(0.0115 if review.is_dense else 0.0100)
        if review.is_due:
            review.decide(review.median)
    assert review.settled == 0.0100 and LONGEST_RACE / 2 < taken <= LONGEST_RACE


def test_a_race_that_is_even_goes_to_dense() -> None:
    review = Review(sparse=0.03, dense=0.08, is_dense=True)
    assert after(review, 0.20) is Verdict.SWITCH and not review.is_dense
    assert after(review, 0.195) is Verdict.SWITCH and review.is_dense


def test_a_settled_choice_is_checked_now_and_then_and_measured_anew_when_steps_change() -> None:
    review = Review(sparse=0.05, dense=1.0, is_dense=False)
    after(review, 0.2)
    assert after(review, 0.2, FIRST_CHECK) is Verdict.STAY
    for _ in range(FIRST_CHECK):
        review.note(0.2)
    assert not review.is_due  # the next check is twice as far away
    assert after(review, 0.2 * CHANGED * 1.1, FIRST_CHECK) is Verdict.SURVEY


def test_a_settled_way_that_becomes_slower_than_the_other_was_is_looked_at_again() -> None:
    review = Review(sparse=0.05, dense=0.08, is_dense=False)
    run_race(review, dense=0.22, sparse=0.20)
    assert not review.is_dense and review.loser == 0.22
    assert after(review, 0.23, SETTLING + FIRST_CHECK) is Verdict.SURVEY


def test_of_short_steps_more_are_measured() -> None:
    review = Review(sparse=0.005, dense=0.008, is_dense=False)
    for _ in range(SETTLING + MEASURED):
        review.note(0.02)
    assert review.is_due and review.decide(0.02) is Verdict.STAY
    assert review.settled is None and not review.is_due
    for _ in range(steps_of(0.02) - MEASURED):
        review.note(0.02)
    assert review.is_due and review.decide(0.02) is Verdict.SWITCH
    assert steps_of(10.0) == MEASURED and steps_of(1e-9) == MOST_MEASURED


def test_steps_right_after_a_change_do_not_count() -> None:
    review = Review(sparse=0.05, dense=1.0, is_dense=False)
    for _ in range(SETTLING):
        review.note(100.0)
    for _ in range(MEASURED):
        review.note(0.2)
    assert review.median == 0.2
