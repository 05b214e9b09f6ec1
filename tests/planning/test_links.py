"""Lines are probed pair by pair, all ranks get the same numbers, and ranks that are close are found."""

import math

import pytest

from spardl.errors import ConfigError
from spardl.planning.links import Links, meetings, probe
from threads import on_threads


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_all_pairs_meet_once_and_both_sides_know(workers: int) -> None:
    schedules = [meetings(workers, rank, all_pairs=True) for rank in range(workers)]
    assert len({len(each) for each in schedules}) == 1
    met = set()
    for turn in zip(*schedules, strict=True):
        for rank, meeting in enumerate(turn):
            if meeting is not None:
                other = meeting[0]
                assert meeting == (other, other) and turn[other] == (rank, rank)
                met.add((rank, other))
    assert met == {(a, b) for a in range(workers) for b in range(workers) if a != b}


@pytest.mark.parametrize("workers", [2, 3, 9, 64])
def test_a_sample_meets_round_the_ring_and_connects_all(workers: int) -> None:
    schedules = [meetings(workers, rank, all_pairs=False) for rank in range(workers)]
    for turn in zip(*schedules, strict=True):
        for rank, meeting in enumerate(turn):
            assert meeting is not None and turn[meeting[0]] is not None
            assert turn[meeting[0]][1] == rank
    assert len(schedules[0]) == math.ceil(math.log2(workers))


def test_one_worker_meets_nobody() -> None:
    assert meetings(1, 0, all_pairs=True) == [] and Links.uniform(1, latency=0.0, rate=1.0).latency == 0.0


@pytest.mark.parametrize("workers", [2, 3])
def test_all_ranks_get_the_same_numbers(workers: int) -> None:
    found = on_threads(workers, probe)
    assert all(each == found[0] for each in found)
    assert found[0].workers == workers and found[0].latency > 0 and found[0].rate > 0
    assert all(row[rank] is None for rank, row in enumerate(found[0].latencies))


def two_regions(far: float) -> Links:
    region = [0, 1, 0, 1]
    latencies = tuple(
        tuple(None if a == b else 0.0002 if region[a] == region[b] else far for b in range(4)) for a in range(4)
    )
    return Links(latencies, tuple(tuple(None if a == b else 1e8 for b in range(4)) for a in range(4)))


def test_ranks_that_are_close_form_a_cluster_wherever_they_stand() -> None:
    assert two_regions(0.02).clusters() == ((0, 2), (1, 3))


def test_noise_makes_no_regions() -> None:
    assert two_regions(0.0005).clusters() == ((0, 1, 2, 3),)


def test_the_slowest_rank_gives_the_rate() -> None:
    rates = ((None, 10.0, 10.0), (10.0, None, 10.0), (1.0, 1.0, None))
    assert Links(((None,) * 3,) * 3, rates).rate == 1.0


def test_a_network_without_lines_is_refused() -> None:
    with pytest.raises(ConfigError, match="no network"):
        Links.uniform(4, latency=0.0, rate=0.0)
