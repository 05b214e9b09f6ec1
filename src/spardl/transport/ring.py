"""What an all-reduce by a ring costs: the yardstick for dense exchanges, whoever makes them.

A reduce-scatter and an all-gather of P-1 steps each, in every one of which each rank sends one P-th of the vector.
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from spardl.metrics import Traffic


def ring_steps(workers: int) -> int:
    """Messages of a ring that follow one another: 2(P-1)."""
    return 2 * (workers - 1)


def ring_share(workers: int) -> float:
    """How much of a vector a rank must send so that all have the sum: 2(P-1)/P."""
    return 2 * (workers - 1) / workers


def ring_amount(size: int, workers: int) -> float:
    """What a rank sends of a vector of `size` bytes, or entries. A rank receives as much."""
    return 2 * size * (workers - 1) / workers


def count_ring(traffic: Traffic, size: int, workers: int, seconds: float) -> None:
    """Enter an all-reduce of `size` bytes into the account of one rank."""
    steps, moved = ring_steps(workers), round(ring_amount(size, workers))
    traffic.count(rounds=steps, messages=steps, sent=moved, received=moved, seconds=seconds)
