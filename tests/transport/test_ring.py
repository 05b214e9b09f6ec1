"""What a ring all-reduce sends, step by step."""

import pytest

from spardl.metrics import Traffic
from spardl.transport.ring import count_ring, ring_amount, ring_share, ring_steps


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_each_step_of_a_ring_moves_one_share_of_the_vector(workers: int) -> None:
    """P-1 steps to sum, P-1 to share; alone, a rank sends nothing."""
    assert ring_steps(workers) == 2 * (workers - 1)
    assert ring_amount(1200, workers) == ring_steps(workers) * 1200 / workers
    assert ring_share(workers) == ring_amount(1, workers)


@pytest.mark.parametrize(("workers", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_rank_sends_its_share_twice(workers: int, share: float) -> None:
    """(P-1)/P of the vector to those who sum it, and as much of the sums."""
    assert ring_share(workers) == share


def test_a_ring_is_counted_by_its_steps() -> None:
    traffic = Traffic()
    count_ring(traffic, 1000, 3, 0.25)
    assert (traffic.rounds, traffic.messages, traffic.bytes_sent, traffic.bytes_received) == (4, 4, 1333, 1333)
    assert traffic.seconds == 0.25
