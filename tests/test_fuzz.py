"""A few seconds of fuzzing. `python -m benchmarks.fuzz` does more, with bounds checks in compiled code."""

import random

import pytest

pytest.importorskip("benchmarks.fuzz")  # not part of the source distribution

from benchmarks.fuzz.mutate import mutated
from benchmarks.fuzz.run import RIGHT, Tally, attempt, chosen, made_of, try_all, try_known
from benchmarks.fuzz.targets import TARGETS, Target


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    return made_of()


def test_what_is_right_is_read_and_what_was_found_once_is_not_found_again(targets: list[Target]) -> None:
    for target in targets:
        for data in target.right:
            if target.name != "greeting":  # strangers' are refused, however right they look
                assert attempt(target, data, random.Random(0)) == (RIGHT, ""), (target.name, data[:80])
    tally = Tally()
    try_known(targets, tally)
    assert not tally.foul, tally.findings


def test_a_number_gives_the_same_case_again(targets: list[Target]) -> None:
    again = made_of()
    for number in range(200):
        (first, data, _), (second, same, _) = chosen(targets, 7, number), chosen(again, 7, number)
        assert (first.name, data) == (second.name, same)
    assert {chosen(targets, 0, number)[0].name for number in range(600)} == {kind.name for kind in TARGETS}


def test_nothing_but_answers_and_errors_of_our_own_come_of_bytes_that_are_almost_right(targets: list[Target]) -> None:
    """Another seed every time; the text of a failure has it, and the number of the case."""
    seed, tally = random.SystemRandom().randrange(1 << 20), Tally()
    assert try_all(targets, seed, 4000, 60.0, tally) > 0
    assert not tally.foul, (seed, tally.findings)


class Fragile(Target):
    """Stands for a reader that checks too little."""

    name, weight = "fragile", 1

    def samples(self) -> list[bytes]:
        return [bytes(8)]

    def read(self, data: bytes, chance: random.Random) -> None:
        if len(data) > 10:
            raise IndexError("outside")


def test_an_error_that_is_not_ours_is_a_finding() -> None:
    tally = Tally()
    assert try_all([Fragile()], 0, 200, 60.0, tally) == 200
    assert tally.foul == tally.counts["fragile", "IndexError"] > 0
    assert "IndexError" in tally.findings[0] and "case" in tally.findings[0]


def test_mutations_stay_short_and_change_something() -> None:
    sample, chance = bytes(range(100)), random.Random(0)
    found = [mutated(sample, [sample], chance, text=number % 2 == 0) for number in range(300)]
    assert sum(data != sample for data in found) > 280 and max(map(len, found)) <= 1 << 16
