"""Drives one program per rank to its end, all in one process: deterministic, counting everything.

Ranks are advanced in virtual time, and the messages of rounds travel as `network.py` says. An all-reduce is timed as a
ring in lockstep that begins when all ranks have come and has the network to itself: the messages of one of its 2(P - 1)
rounds are simulated, and the others take as long. On a switch that is exact; where paths differ, ranks that could run
ahead are held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spardl.collectives.program import AllReduce, Program, Round
from spardl.errors import ProtocolError
from spardl.metrics import Traffic
from spardl.simulator.clock import Clock
from spardl.simulator.network import Carrier, Link, Network, Transfer
from spardl.transport.ring import count_ring, ring_steps
from spardl.transport.sparse_sum import sum_in_order

Result = TypeVar("Result")


class Driver:
    """All ranks of a network. Their clocks, their traffic and what links are busy with go on from run to run."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.traffic = [Traffic() for _ in range(network.workers)]
        self.clocks = [0.0] * network.workers
        self.busy: dict[Link, float] = {}

    @property
    def time(self) -> float:
        """Seconds until the last rank was done."""
        return max(self.clocks)

    def run(self, programs: Sequence[Program[Result]]) -> list[Result]:
        """Drive one program per rank, all to their ends; return what they return.

        Raises `ProtocolError` for programs that wait for each other for ever, and for a message over its capacity.
        """
        return _Run(self, programs).finish()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A rank inside a round: what it has sent, until when that takes, and whose messages have not come yet."""

    operation: Round
    sent: int
    end: float
    missing: set[int]


class _Run(Generic[Result]):
    def __init__(self, driver: Driver, programs: Sequence[Program[Result]]) -> None:
        self.driver = driver
        self.programs = programs
        self.clock = Clock()
        self.carrier = Carrier(driver.network, driver.busy, self.clock, self._deliver)
        self.results: dict[int, Result] = {}
        self.exchanging: dict[int, _Waiting] = {}
        self.reducing: dict[int, AllReduce] = {}
        # By receiver and sender, the oldest first: what has come and was not asked for yet.
        self.mail: list[dict[int, list[Transfer]]] = [{} for _ in range(driver.network.workers)]

    def finish(self) -> list[Result]:
        for rank in range(len(self.programs)):
            self._resume(rank, self.driver.clocks[rank], None)
        self.clock.run()
        if len(self.results) < len(self.programs):
            raise ProtocolError(f"the programs wait for each other: {self._deadlock()}.")
        return [self.results[rank] for rank in range(len(self.programs))]

    def _resume(self, rank: int, time: float, value: Any) -> None:
        """At `time`, a program is sent what it waited for."""
        self.driver.clocks[rank] = time
        self.clock.at(time, rank, self._advance, value)

    def _advance(self, rank: int, value: Any) -> None:
        try:
            operation = self.programs[rank].send(value)
        except StopIteration as stop:
            self.results[rank] = stop.value
            return
        if isinstance(operation, Round):
            self._exchange(rank, operation)
        else:
            self._reduce(rank, operation)

    def _exchange(self, rank: int, operation: Round) -> None:
        """Begin a round: hand its messages to the network, and wait for those that it expects."""
        now = self.driver.clocks[rank]
        sent, end = 0, now
        for peer, frame, _ in operation.send:
            size = len(frame)
            sent += size
            end = max(end, self.carrier.send(now, rank, peer, size, frame))
        if operation.meanwhile is not None:
            operation.meanwhile()
        missing = {peer for peer, _ in operation.receive if peer not in self.mail[rank]}
        waiting = _Waiting(operation, sent, end, missing)
        if missing:
            self.exchanging[rank] = waiting
        else:
            self._complete(rank, waiting)

    def _deliver(self, message: Transfer) -> None:
        """Put a message into its receiver's mail. Its last byte may come later, but nothing changes that time now."""
        self.mail[message.target].setdefault(message.source, []).append(message)
        waiting = self.exchanging.get(message.target)
        if waiting is None:
            return
        waiting.missing.discard(message.source)
        if not waiting.missing:
            del self.exchanging[message.target]
            self._complete(message.target, waiting)

    def _complete(self, rank: int, waiting: _Waiting) -> None:
        """End a round when the last expected message has come and the last own one has left."""
        operation, end = waiting.operation, waiting.end
        frames, received = [], 0
        for peer, capacity in operation.receive:
            message = self._open(rank, peer)
            size = len(message.frame)
            if size > capacity:
                told = f"rank {peer} sent {size} bytes to rank {rank}, which expected {capacity}."
                raise ProtocolError(told, peer=peer)
            frames.append(message.frame)
            received += size
            end = max(end, message.tail)
        self.driver.traffic[rank].count(
            rounds=1, messages=len(operation.send), sent=waiting.sent, received=received, seconds=0
        )
        self._resume(rank, end, frames)

    def _open(self, rank: int, peer: int) -> Transfer:
        """Take the oldest message from a peer out of a rank's mail, where no empty list stays behind."""
        messages = self.mail[rank].pop(peer)
        oldest = messages.pop(0)
        if messages:
            self.mail[rank][peer] = messages
        return oldest

    def _reduce(self, rank: int, operation: AllReduce) -> None:
        """Sum in rank order once all ranks have come; time and bytes are those of a ring."""
        self.reducing[rank] = operation
        count = len(self.programs)
        if len(self.reducing) < count:
            return
        tensors = [self.reducing.pop(member).tensor for member in range(count)]
        total = sum_in_order(tensors)
        size = total.numel() * total.element_size()
        end = self.driver.time + _ring_seconds(self.driver.network, count, size)
        for member, tensor in enumerate(tensors):
            tensor.copy_(total)
            count_ring(self.driver.traffic[member], size, count, seconds=0)
            self._resume(member, end, None)

    def _deadlock(self) -> str:
        stuck = {rank: f"rank {rank} in {operation.name} for all" for rank, operation in self.reducing.items()}
        for rank, waiting in self.exchanging.items():
            missing = [str(peer) for peer, _ in waiting.operation.receive if peer in waiting.missing]
            stuck[rank] = f"rank {rank} in {waiting.operation.name} for {', '.join(missing)}"
        return "; ".join(stuck[rank] for rank in sorted(stuck)[:4])


def _ring_seconds(network: Network, count: int, size: int) -> float:
    """How long a ring over `size` bytes takes `count` ranks: 2(count - 1) times the slowest message of one round."""
    if count == 1:
        return 0.0
    clock, messages = Clock(), list[Transfer]()
    carrier = Carrier(network, {}, clock, messages.append)
    for rank in range(count):
        carrier.send(0.0, rank, (rank + 1) % count, size / count)
    clock.run()
    return ring_steps(count) * max(message.tail for message in messages)
