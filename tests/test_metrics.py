"""Numbers that people ask for: what was sent, how dense it was, and where the time went."""

import json

import pytest

from spardl.metrics import GroupStats, SyncStats, Traffic


def test_traffic_counts_what_moved():
    traffic = Traffic()
    traffic.count(rounds=1, messages=2, sent=300, received=100, seconds=0.5)
    traffic.count(rounds=1, messages=1, sent=10, received=40, seconds=0.25)
    assert (traffic.rounds, traffic.messages, traffic.bytes_sent, traffic.bytes_received) == (2, 3, 310, 140)
    assert traffic.seconds == pytest.approx(0.75)


def test_time_beyond_the_best_rate_is_waiting():
    """600 bytes/s was the best, so 60 bytes took 0.1 s of transfer, however long the round was."""
    traffic = Traffic()
    traffic.count(rounds=1, messages=1, sent=300, received=0, seconds=0.5)
    assert traffic.seconds_transferring == pytest.approx(0.5)
    traffic.count(rounds=1, messages=1, sent=0, received=60, seconds=2.0)
    assert traffic.seconds_transferring == pytest.approx(0.6)


def test_transfer_never_takes_longer_than_the_round():
    traffic = Traffic()
    for moved, seconds in [(10, 1.0), (1000, 0.1), (0, 0.5), (7, 0.0), (5, 0.5)]:
        before = traffic.copy()
        traffic.count(rounds=1, messages=1, sent=moved, received=0, seconds=seconds)
        assert 0 <= traffic.seconds_transferring - before.seconds_transferring <= seconds * (1 + 1e-9)


def test_a_transport_that_knows_the_time_of_transfer_is_believed():
    """It neither uses the best rate of other rounds nor sets one for them."""
    traffic = Traffic()
    traffic.count(rounds=1, messages=1, sent=300, received=0, seconds=0.5)
    traffic.count(rounds=1, messages=1, sent=8, received=8, seconds=2.0, transferring=1e-6)
    assert traffic.seconds_transferring == pytest.approx(0.5 + 1e-6)
    traffic.count(rounds=1, messages=1, sent=60, received=0, seconds=1.0)
    assert traffic.seconds_transferring == pytest.approx(0.6 + 1e-6)


def test_a_copy_of_traffic_stays_as_it_was():
    traffic = Traffic()
    before = traffic.copy()
    traffic.count(rounds=1, messages=1, sent=1, received=1, seconds=1.0)
    assert before == Traffic()


def group(name="layer", **numbers):
    return GroupStats(name, elements=1000, **numbers)


def test_a_step_is_split_into_selecting_packing_waiting_and_transferring():
    stats, before, after = group(), Traffic(), Traffic()
    after.count(rounds=1, messages=1, sent=100, received=100, seconds=0.1)
    after.count(rounds=1, messages=1, sent=100, received=100, seconds=0.4)
    stats.observe(before, after, seconds=0.75, packing=0.05)
    assert (stats.rounds, stats.messages, stats.bytes_sent) == (2, 2, 200)
    assert stats.seconds_transferring == pytest.approx(0.2)
    assert stats.seconds_waiting == pytest.approx(0.3)
    assert stats.seconds_packing == pytest.approx(0.05)
    assert stats.seconds_selecting == pytest.approx(0.2)


def test_density_and_bits_are_averages_over_what_was_done():
    stats = group(steps=4, entries=40, bytes_sent=300, entries_sent=100)
    assert stats.density == pytest.approx(0.01)
    assert stats.bits_per_entry == pytest.approx(24)


def test_nothing_done_yet_is_zero_and_not_an_error():
    assert group().density == group().bits_per_entry == 0
    total = SyncStats([]).total
    assert total.density == total.bits_per_entry == total.elements == 0


def test_the_total_adds_groups_but_counts_a_step_once():
    first = group("a", steps=3, skipped=1, rounds=6, bytes_sent=60, entries_sent=20, entries=30, seconds_waiting=1.0)
    second = group("b", steps=3, skipped=1, rounds=2, bytes_sent=40, entries_sent=5, entries=90, seconds_waiting=0.5)
    total = SyncStats([first, second]).total
    assert (total.elements, total.steps, total.skipped, total.rounds) == (2000, 3, 1, 8)
    assert total.density == pytest.approx(120 / 2000 / 3)
    assert total.bits_per_entry == pytest.approx(8 * 100 / 25)
    assert total.seconds_waiting == pytest.approx(1.5)
    assert (first.elements, first.rounds) == (1000, 6), "the groups themselves stay"


@pytest.mark.parametrize("dense,expected", [([True, True], True), ([True, False], False)])
def test_the_total_is_dense_only_if_every_group_is(dense, expected):
    assert SyncStats([group(dense=each) for each in dense]).total.dense is expected


def test_statistics_are_plain_data():
    stats = SyncStats([group("a", steps=1, entries=10, bytes_sent=30, entries_sent=10)])
    record = json.loads(json.dumps(stats.to_dict()))
    assert record["total"]["name"] == "total"
    assert record["groups"][0]["bits_per_entry"] == pytest.approx(24)
    assert record["groups"][0]["density"] == pytest.approx(0.01)
