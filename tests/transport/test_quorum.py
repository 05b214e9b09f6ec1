"""Those that are left agree on who they are, whoever is lost meanwhile; and only one part goes on."""

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spardl.errors import PeerError
from spardl.transport import quorum
from spardl.transport.quorum import Ballot, Proposal, agree, ballot_of, be_let_in
from spardl.transport.watch import Watch
from spardl.transport.words import NOBODY, Card, Silence, Standing
from watching import HOST, watches

TIMEOUT = 20.0


def all_at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def agreeing(made: list[Watch], concluded: list[int], **how: Any) -> list[Proposal]:
    def one(position: int) -> Callable[[], Proposal]:
        return lambda: agree(made[position], (HOST, 1000 + position), concluded[position], timeout=TIMEOUT, **how)

    return all_at_once([one(position) for position in range(len(made))])


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_all_that_are_left_decide_the_same(lost: int) -> None:
    with watches(4) as made:
        made[lost].close()
        left = [watch for watch in made if watch.number != lost]
        found = agreeing(left, [7, 8, 7])
        assert len(set(found)) == 1
        assert found[0].members == tuple(watch.number for watch in left)
        assert (found[0].epoch, found[0].concluded, found[0].decided) == (1, 8, True)
        assert [card.mesh for card in found[0].cards] == [(HOST, 1000 + position) for position in range(3)]
        for watch in left:
            watch.adopt(found[0].epoch, found[0].members)
        assert [watch.rank for watch in left] == [0, 1, 2] and all(watch.ballot is None for watch in left)
        left[0].close()
        again = agreeing(left[1:], [9, 9])
        assert again[0] == again[1] and (again[0].epoch, again[0].members) == (2, found[0].members[1:])


def test_a_newcomer_gets_the_next_number() -> None:
    with watches(2) as made:
        newcomer = Watch(NOBODY)
        here = newcomer.open_to(HOST, made[0].secret, made[0].places)
        card = Card(here, (HOST, 2000))
        made[1]._ear.knocks[card] = 1e18  # it has knocked there, and all were told
        jobs: list[Callable[[], Any]] = [lambda: be_let_in(newcomer, card, timeout=TIMEOUT)]
        jobs += [lambda watch=watch: agree(watch, (HOST, 1000), 5, timeout=TIMEOUT, guests=True) for watch in made]  # type: ignore[misc]
        found = all_at_once(jobs)
        assert len(set(found)) == 1 and found[0].members == (0, 1, 2) and found[0].cards[2] == card
        assert newcomer.number == 2
        newcomer.close()


def test_nobody_is_let_in_while_a_loss_is_settled() -> None:
    with watches(3) as made:
        made[2].close()
        made[0]._ear.knocks[Card((HOST, 1), (HOST, 2))] = 1e18
        assert {each.members for each in agreeing(made[:2], [1, 1])} == {(0, 1)}


class Fixed:
    """A watch whose answers are given."""

    def __init__(self, number: int, answers: dict[int, Any]) -> None:
        self.number = self.rank = number
        self.epoch, self.known, self.knocks = 0, 4, list[Card]()
        self.members = tuple(sorted([number, *answers]))
        self.place = (HOST, 1)
        self.ballot: Any = None
        self._answers = answers

    def survey(self, numbers: Any) -> dict[int, Any]:
        return {number: self._answers[number] for number in numbers}


def council(number: int, answers: dict[int, Any]) -> quorum._Council:
    made = quorum._Council(Fixed(number, answers), Ballot(0, 3, Card((HOST, 1), (HOST, 2))), TIMEOUT)  # type: ignore[arg-type]
    made._began -= 1000  # everybody has been waited for
    return made


HERE = Standing(ballot=json.loads(json.dumps(dataclasses.asdict(Ballot(0, 3, Card((HOST, 1), (HOST, 2)))))))


@pytest.mark.parametrize(
    ("number", "answers", "goes_on"),
    [
        (0, {1: HERE, 2: Silence.UNREACHABLE}, True),
        (1, {0: Silence.UNREACHABLE, 2: HERE, 3: HERE}, True),
        (0, {1: Silence.MUTE, 2: Silence.UNREACHABLE, 3: HERE}, True),
        (2, {0: Silence.UNREACHABLE, 1: Silence.UNREACHABLE, 3: HERE}, False),
        (2, {0: Silence.UNREACHABLE, 1: Silence.MUTE}, False),
        (2, {0: Silence.GONE, 1: Silence.GONE}, True),
    ],
)
def test_of_two_parts_that_cannot_reach_each_other_one_goes_on(
    number: int, answers: dict[int, Any], goes_on: bool
) -> None:
    """The larger, or the one with the lowest rank. Who is gone for certain cannot go on, and does not count."""
    if goes_on:
        assert council(number, answers).look() is None  # it has proposed
    else:
        with pytest.raises(PeerError, match="which may go on without it"):
            council(number, answers).look()


def test_who_was_left_behind_is_told() -> None:
    with pytest.raises(PeerError, match="this one, was given up on") as caught:
        council(1, {0: Standing(epoch=2, members=(0, 3)), 3: HERE}).look()
    assert caught.value.peer == 1


def test_a_ballot_that_cannot_be_understood_is_none() -> None:
    good = dataclasses.asdict(
        Ballot(0, 3, Card((HOST, 1), (HOST, 2)), Proposal(1, (0,), (Card((HOST, 1), (HOST, 2)),), 3, "k"))
    )
    assert ballot_of(Standing(ballot=json.loads(json.dumps(good)))) is not None
    for key, bad in [
        ("epoch", -1),
        ("card", None),
        ("proposal", {}),
        ("knocks", [1]),
        ("known", "x"),
        ("concluded", 0.5),
    ]:
        assert ballot_of(Standing(ballot={**good, key: bad})) is None, key
    assert ballot_of(Silence.GONE) is None
