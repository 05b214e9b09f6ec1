"""Virtual time: the order of events depends on their times and ranks, not on when they were scheduled."""

from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.simulator.clock import Clock


@settings(deadline=None)
@given(st.permutations([(time, rank) for time in (0.0, 0.5, 2.0) for rank in range(3)]))
def test_events_happen_by_time_and_then_by_rank_whatever_the_order_of_scheduling(order):
    happened = []
    clock = Clock()
    for time, rank in order:
        clock.at(time, rank, lambda rank, time: happened.append((time, rank)), time)
    clock.run()
    assert happened == sorted(order)


def test_events_of_one_rank_at_one_time_happen_in_the_order_of_scheduling():
    happened = []
    clock = Clock()
    for value in "abc":
        clock.at(1.0, 0, lambda _, value: happened.append(value), value)
    clock.run()
    assert happened == ["a", "b", "c"]


def test_an_event_may_schedule_another_before_those_that_are_waiting():
    happened = []
    clock = Clock()

    def first(rank, value):
        happened.append("first")
        clock.at(1.5, rank, lambda *_: happened.append("between"), None)

    clock.at(2.0, 0, lambda *_: happened.append("last"), None)
    clock.at(1.0, 0, first, None)
    clock.run()
    assert happened == ["first", "between", "last"]
