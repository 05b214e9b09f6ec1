"""Whoever caused a failure is named, by every rank that asks around, and nobody else."""

import pytest

from spardl.transport.inquiry import CUT_OFF, LATE, WORDS, Verdict, judge
from spardl.transport.words import Silence, Standing

T = 10.0


def waits(*peers: int, seconds: float = T) -> Standing:
    return Standing(peers, seconds)


def test_the_chain_is_followed_to_the_rank_that_does_not_answer() -> None:
    """Rank 0 waits for 1, 1 for 2, and 2 is stopped: neither 1 nor 3, which waits for 0, is to blame."""
    answers = {1: waits(2), 2: Silence.MUTE, 3: waits(0)}
    assert judge(0, [1], answers, {}, T) == Verdict({2: WORDS[Silence.MUTE]}, victim=1)


def test_a_rank_that_was_waited_for_itself_has_no_victim_between() -> None:
    assert judge(0, [2], {1: waits(2), 2: Silence.GONE}, {}, T) == Verdict({2: WORDS[Silence.GONE]})


def test_a_rank_that_left_has_said_because_of_whom() -> None:
    """Rank 1 is gone, but not at fault: it told that it leaves because of rank 3."""
    verdict = judge(0, [1], {1: Silence.GONE, 2: waits(1), 3: Silence.MUTE}, {1: 3}, T)
    assert verdict == Verdict({3: WORDS[Silence.MUTE]}, victim=1)


@pytest.mark.parametrize(("answer", "words"), [(waits(), LATE), (Silence.UNKNOWN, "was given up on by rank 1")])
def test_of_a_rank_that_another_has_named_something_is_said(answer: Standing | Silence, words: str) -> None:
    """Also where it answers after all, or cannot be asked."""
    assert judge(0, [1], {1: Silence.GONE, 2: answer}, {1: 2}, T) == Verdict({2: words}, victim=1)


def test_a_rank_that_others_gave_up_on_names_itself() -> None:
    verdict = judge(2, [0], {0: Standing(blames=2), 1: Silence.GONE}, {}, T)
    assert list(verdict.faults) == [2]


def test_two_ranks_that_are_gone_are_both_named() -> None:
    assert set(judge(0, [1], {1: Silence.GONE, 2: Silence.MUTE, 3: waits(1)}, {}, T).faults) >= {1}
    assert set(judge(0, [1, 2], {1: Silence.GONE, 2: Silence.MUTE, 3: waits(1)}, {}, T).faults) == {1, 2}


def test_a_rank_that_reaches_nobody_is_cut_off_itself() -> None:
    """With one other rank it cannot tell which of the two is."""
    answers = dict.fromkeys((0, 1, 3), Silence.UNREACHABLE)
    assert judge(2, [0], answers, {}, T) == Verdict({2: CUT_OFF})
    assert list(judge(0, [1], {1: Silence.UNREACHABLE}, {}, T).faults) == [1]


def test_one_rank_that_cannot_be_reached_is_named() -> None:
    assert judge(0, [1], {1: waits(2), 2: Silence.UNREACHABLE, 3: waits(2)}, {}, T).faults.keys() == {2}


@pytest.mark.parametrize("late", [Standing(), waits(3, seconds=0.1 * T)])
def test_where_all_answer_the_one_that_came_late_is_named(late: Standing) -> None:
    """It computes, or has just begun to wait: those that waited all the time waited for it."""
    assert judge(0, [1], {1: waits(2), 2: late, 3: waits(0)}, {}, T) == Verdict({2: LATE}, victim=1)


def test_where_all_wait_for_each_other_nobody_is_named_and_the_candidates_are() -> None:
    verdict = judge(0, [1], {1: waits(2), 2: waits(0)}, {}, T)
    assert verdict == Verdict({}, chain=(1, 2))


def test_a_rank_that_cannot_be_asked_is_not_blamed_for_that() -> None:
    assert judge(0, [1], {1: Silence.UNKNOWN, 2: waits(1)}, {}, T) == Verdict({}, chain=(1,))
