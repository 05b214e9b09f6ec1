"""A transport between threads of one process, for synchronizers of several ranks without processes or sockets."""

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from spardl.collectives.program import AllReduce, Operation
from spardl.metrics import Traffic
from spardl.transport.base import use_the_time

PATIENCE = 60  # seconds, for what would otherwise hang


class Board:
    """What the ranks share: a mailbox per pair, and a table where all lay down a tensor."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # All of them at once: two threads that look up a missing one at the same time would each make their own.
        self.mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            pair: queue.SimpleQueue() for pair in itertools.product(range(workers), repeat=2)
        }
        self.table: list[Tensor] = [Tensor()] * workers
        self.texts = [""] * workers
        self.barrier = threading.Barrier(workers)


class ThreadTransport:
    def __init__(self, board: Board, rank: int) -> None:
        self.rank = rank
        self.workers = board.workers
        self.device = torch.device("cpu")
        self.traffic = Traffic()
        self._board = board

    def perform(self, operation: Operation) -> Any:
        started = time.perf_counter()
        if isinstance(operation, AllReduce):
            return self._all_reduce(operation.tensor)
        for peer, frame, _ in operation.send:
            self._board.mail[self.rank, peer].put(torch.as_tensor(frame).clone())
        use_the_time(operation)
        arrived = [self._board.mail[peer, self.rank].get(timeout=PATIENCE) for peer, _ in operation.receive]
        self.traffic.count(
            rounds=1,
            messages=len(operation.send),
            sent=sum(len(frame) for _, frame, _ in operation.send),
            received=sum(map(len, arrived)),
            seconds=time.perf_counter() - started,
        )
        return arrived

    def gather_texts(self, text: str) -> list[str]:
        self._board.texts[self.rank] = text
        self._board.barrier.wait(PATIENCE)
        texts = list(self._board.texts)
        self._board.barrier.wait(PATIENCE)
        return texts

    def arrive(self) -> None:
        """Whatever was performed is over."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _all_reduce(self, tensor: Tensor) -> None:
        self._board.table[self.rank] = tensor.clone()
        self._board.barrier.wait(PATIENCE)
        tensor.copy_(sum(self._board.table[1:], self._board.table[0]))
        self._board.barrier.wait(PATIENCE)


def on_threads(workers: int, function: Callable[[ThreadTransport], Any]) -> list[Any]:
    """`function(transport)` on a thread per rank; what each returned, in rank order."""
    board = Board(workers)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, [ThreadTransport(board, rank) for rank in range(workers)]))
