"""All ranks in one process on a simulated network: deterministic, with a virtual clock, counting everything.

A message of b bytes leaves when the sender's link is free, takes latency + b / bandwidth, and occupies both links for
b / bandwidth. Links are full duplex. Computing takes no time here.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from spardl.collectives.program import AllReduce, Operation, Program, Round
from spardl.errors import ProtocolError
from spardl.metrics import Traffic
from spardl.sparse import Array

Result = TypeVar("Result")


class SimulatedNetwork:
    """`workers` hosts on one switch. Clocks and traffic add up over runs."""

    def __init__(self, workers: int, *, latency: float = 0.0, bandwidth: float = math.inf) -> None:
        self.workers = workers
        self.latency = latency
        self.bandwidth = bandwidth
        self.traffic = [Traffic() for _ in range(workers)]
        self.clocks = [0.0] * workers

    @property
    def time(self) -> float:
        """Seconds until the last rank was done."""
        return max(self.clocks)

    def run(self, programs: Sequence[Program[Result]]) -> list[Result]:
        """Drive one program per rank, all to their ends."""
        return _Run(self, programs).finish()


class _Run(Generic[Result]):
    def __init__(self, network: SimulatedNetwork, programs: Sequence[Program[Result]]) -> None:
        self.network = network
        self.programs = programs
        self.results: dict[int, Result] = {}
        self.waiting: dict[int, Operation] = {}
        self.mail: dict[tuple[int, int], deque[tuple[Array, float]]] = defaultdict(deque)
        self.ready: deque[tuple[int, Any]] = deque((rank, None) for rank in range(len(programs)))

    def finish(self) -> list[Result]:
        while self.ready:
            rank, value = self.ready.popleft()
            try:
                operation = self.programs[rank].send(value)
            except StopIteration as stop:
                self.results[rank] = stop.value
                continue
            self.waiting[rank] = operation
            if isinstance(operation, Round):
                self._post(rank, operation)
                self._try_complete(rank)
            else:
                self._try_all_reduce()
        if len(self.results) < len(self.programs):
            raise ProtocolError(f"the programs wait for each other: {self._deadlock()}.")
        return [self.results[rank] for rank in range(len(self.programs))]

    def _post(self, rank: int, operation: Round) -> None:
        """Put all messages of a round on the sender's link, one after the other."""
        network = self.network
        free = network.clocks[rank]
        for peer, frame in operation.send:
            free += len(frame) / network.bandwidth
            self.mail[rank, peer].append((frame, free + network.latency))
        network.traffic[rank].count(
            rounds=1,
            messages=len(operation.send),
            sent=sum(len(frame) for _, frame in operation.send),
            received=0,
            seconds=0,
        )
        network.clocks[rank] = free
        operation.use_the_time()
        for peer, _ in operation.send:
            self._try_complete(peer)

    def _try_complete(self, rank: int) -> None:
        """Hand a rank its messages once all of them are under way to it."""
        operation = self.waiting.get(rank)
        if not isinstance(operation, Round) or not all(self.mail[peer, rank] for peer, _ in operation.receive):
            return
        network = self.network
        frames = []
        free = network.clocks[rank]
        arrived = 0.0
        for peer, capacity in operation.receive:
            frame, arrival = self.mail[peer, rank].popleft()
            if len(frame) > capacity:
                raise ProtocolError(
                    f"rank {peer} sent {len(frame)} bytes to rank {rank}, which expected {capacity}.", peer=peer
                )
            arrived = max(arrival, arrived + len(frame) / network.bandwidth)
            frames.append(frame)
        network.clocks[rank] = max(free, arrived)
        network.traffic[rank].count(rounds=0, messages=0, sent=0, received=sum(map(len, frames)), seconds=0)
        del self.waiting[rank]
        self.ready.append((rank, frames))

    def _try_all_reduce(self) -> None:
        """Sum in rank order once all ranks have come; time and bytes are those of a ring."""
        network, count = self.network, len(self.programs)
        tensors = [op.tensor for _, op in sorted(self.waiting.items()) if isinstance(op, AllReduce)]
        if len(tensors) < count:
            return
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        size = total.numel() * total.element_size()
        moved = 2 * size * (count - 1) / count
        finish = max(network.clocks) + 2 * (count - 1) * network.latency + moved / network.bandwidth
        for rank, tensor in enumerate(tensors):
            tensor.copy_(total)
            network.clocks[rank] = finish
            rounds = 2 * (count - 1)
            network.traffic[rank].count(
                rounds=rounds, messages=rounds, sent=round(moved), received=round(moved), seconds=0
            )
            del self.waiting[rank]
            self.ready.append((rank, None))

    def _deadlock(self) -> str:
        stuck = []
        for rank, operation in sorted(self.waiting.items()):
            if isinstance(operation, Round):
                missing = [peer for peer, _ in operation.receive if not self.mail[peer, rank]]
                stuck.append(f"rank {rank} in {operation.name} for {', '.join(map(str, missing))}")
            else:
                stuck.append(f"rank {rank} in {operation.name} for all")
        return "; ".join(stuck[:4])
