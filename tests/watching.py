"""Watches of several ranks, all in this process."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from spardl.transport.watch import Watch
from threads import Board, ThreadTransport

HOST = "127.0.0.1"


@contextlib.contextmanager
def watches(workers: int, address: str = HOST) -> Iterator[list[Watch]]:
    """One per rank, all in this process."""
    board = Board(workers)
    made = [Watch(rank) for rank in range(workers)]

    def open_one(rank: int) -> None:
        made[rank].open(address, ThreadTransport(board, rank).gather_texts)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(open_one, range(workers)))
    try:
        yield made
    finally:
        for each in made:
            each.close()
