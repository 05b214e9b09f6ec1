"""Drives one program per rank to its end, all in one process: deterministic, counting everything.

Ranks are advanced in virtual time, and the messages of rounds travel as `flows.py` says. An all-reduce is timed as a
ring in lockstep that begins when all ranks have come and has the network to itself: the messages of one of its 2(P - 1)
rounds are simulated, and the others take as long. On a switch that is exact; where paths differ, ranks that could run
ahead are held back.

Beside rounds and all-reduces, programs of the simulator itself may compute (`Work`), and start other programs on their
rank (`Start`) that they wait for later (`Join`): so a step's communication runs beside its computing.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from spardl.collectives.program import AllReduce, Ask, Operation, Program, Round, answers
from spardl.errors import ProtocolError
from spardl.metrics import Traffic
from spardl.simulator.clock import Clock
from spardl.simulator.computing import Cores, Machine
from spardl.simulator.flows import Flows
from spardl.simulator.network import Link, Network, travel_time
from spardl.sparse import Array
from spardl.transport.ring import count_ring, ring_steps
from spardl.transport.sparse_sum import sum_in_order

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Work:
    """Compute for so many seconds, longer on a slower rank. `name` is for people."""

    seconds: float
    name: str


@dataclass(eq=False, slots=True)
class Lane:
    """A program on a rank, and where it is. `after`: it begins when this other one of its rank has ended."""

    rank: int
    program: "Steps[Any]"
    after: "Lane | None" = None
    ended: bool = False
    result: Any = None
    waiting: list["Lane"] = field(default_factory=list)  # lanes that go on when this one ends


@dataclass(frozen=True, slots=True)
class Start:
    """Begin another program on this rank, at once or when the lane `after` has ended. The program is sent its lane."""

    program: "Steps[Any]"
    after: Lane | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for a lane; the program is sent what that one has returned."""

    lane: Lane


Steps = Generator[Operation | Ask | Work | Start | Join, Any, Result]


class Span(NamedTuple):
    """What a rank was doing, and when: for pictures."""

    rank: int
    name: str
    start: float
    end: float
    computing: bool


class Driver:
    """All ranks of a network. Their clocks and their traffic go on from run to run; a run begins on idle links.

    `carried` are the bytes of each link so far. `spans` are kept if `watched` ranks are named.
    """

    def __init__(self, network: Network, machine: Machine | None = None, *, watched: Sequence[int] = ()) -> None:
        self.network = network
        self.machine = machine or Machine()
        self.traffic = [Traffic() for _ in range(network.workers)]
        self.clocks = [0.0] * network.workers
        self.carried: dict[Link, float] = {}
        self.spans: list[Span] = []
        self.watched = frozenset(watched)

    @property
    def time(self) -> float:
        """Seconds until the last rank was done."""
        return max(self.clocks)

    def run(self, programs: Sequence[Program[Result]] | Sequence[Steps[Result]]) -> list[Result]:
        """Drive one program per rank, all to their ends; return what they return.

        Raises `ProtocolError` for programs that wait for each other for ever, and for a message over its capacity.
        """
        return _Run(self, programs).finish()


class _Mail(NamedTuple):
    frame: Array
    size: int


@dataclass(eq=False, slots=True)
class _Waiting:
    """A lane inside a round: what it has sent, how much of it is under way, and whose messages have not come yet."""

    lane: Lane
    operation: Round
    began: float
    sent: int
    leaving: int
    missing: set[int]


class _Run(Generic[Result]):
    def __init__(self, driver: Driver, programs: Sequence[Any]) -> None:
        self.driver = driver
        self.lanes = [Lane(rank, program) for rank, program in enumerate(programs)]
        self.clock = Clock()
        self.flows = Flows(self.clock)
        self.flows.carried = driver.carried
        self.cores = Cores(driver.machine.cores)
        self.exchanging: dict[int, _Waiting] = {}
        self.reducing: dict[int, tuple[Lane, AllReduce]] = {}
        # By receiver and sender, the oldest first: what has come and was not asked for yet.
        self.mail: list[dict[int, list[_Mail]]] = [{} for _ in range(driver.network.workers)]

    def finish(self) -> list[Result]:
        for lane in self.lanes:
            self._resume(lane, self.driver.clocks[lane.rank], None)
        self.clock.run()
        if not all(lane.ended for lane in self.lanes):
            raise ProtocolError(f"the programs wait for each other: {self._deadlock()}.")
        return [lane.result for lane in self.lanes]

    def _resume(self, lane: Lane, time: float, value: Any) -> None:
        """At `time`, a program is sent what it waited for."""
        self.clock.at(time, lane.rank, self._advance, (time, lane, value))

    def _advance(self, rank: int, what: Any) -> None:
        now, lane, value = what
        clocks = self.driver.clocks
        clocks[rank] = max(clocks[rank], now)
        try:
            operation = lane.program.send(value)
        except StopIteration as stop:
            self._leave(now, lane, stop.value)
            return
        if isinstance(operation, Round):
            self._prepare(now, lane, operation)
        elif isinstance(operation, AllReduce):
            self._reduce(now, lane, operation)
        elif isinstance(operation, Work):
            self._work(now, lane, operation)
        elif isinstance(operation, Start):
            self._start(now, lane, operation)
        elif isinstance(operation, Ask):
            self._resume(lane, now, answers([operation])[0])
        else:
            self._join(now, lane, operation.lane)

    # --- lanes ----------------------------------------------------------------------------------------------------

    def _start(self, now: float, lane: Lane, operation: Start) -> None:
        begun = Lane(lane.rank, operation.program, operation.after)
        if begun.after is None or begun.after.ended:
            self._resume(begun, now, None)
        else:
            begun.after.waiting.append(begun)
        self._resume(lane, now, begun)

    def _join(self, now: float, lane: Lane, other: Lane) -> None:
        if other.ended:
            self._resume(lane, now, other.result)
        else:
            other.waiting.append(lane)

    def _leave(self, now: float, lane: Lane, result: Any) -> None:
        lane.ended, lane.result = True, result
        for other in lane.waiting:
            self._resume(other, now, None if other.after is lane else result)
        lane.waiting.clear()

    def _work(self, now: float, lane: Lane, operation: Work) -> None:
        end = self.cores.until(now, self.driver.machine.seconds(lane.rank, operation.seconds))
        self._note(lane.rank, operation.name, now, end, computing=True)
        self._resume(lane, end, None)

    def _note(self, rank: int, name: str, start: float, end: float, *, computing: bool) -> None:
        if rank in self.driver.watched and end > start:
            self.driver.spans.append(Span(rank, name, start, end, computing))

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _prepare(self, now: float, lane: Lane, operation: Round) -> None:
        """A round's own computing comes before its messages."""
        costs = self.driver.machine.costs
        sent = sum(len(frame) for _, frame, _ in operation.send)
        seconds = self.driver.machine.seconds(lane.rank, costs.per_round + costs.per_byte * sent)
        if not seconds:
            self._exchange(lane.rank, (now, lane, operation))
            return
        begin = self.cores.until(now, seconds)
        self.clock.at(begin, lane.rank, self._exchange, (begin, lane, operation))

    def _exchange(self, rank: int, what: Any) -> None:
        """Begin a round: hand its messages to the network, and wait for those that it expects."""
        now, lane, operation = what
        missing = {peer for peer, _ in operation.receive if peer not in self.mail[rank]}
        waiting = _Waiting(lane, operation, now, 0, len(operation.send), missing)
        self.exchanging[rank] = waiting
        for peer, frame, _ in operation.send:
            waiting.sent += len(frame)
            self._send(now, waiting, peer, frame)
        if operation.meanwhile is not None:
            operation.meanwhile()
        self._complete_if_done(now, waiting)

    def _send(self, now: float, waiting: _Waiting, peer: int, frame: Array) -> None:
        rank, size = waiting.lane.rank, len(frame)
        path = self.driver.network.path(rank, peer)
        late = travel_time(path, size)

        def through() -> None:
            moment = self.clock.now
            waiting.leaving -= 1
            self.clock.at(moment + late, peer, self._deliver, (rank, _Mail(frame, size)))
            self._complete_if_done(moment, waiting)

        self.flows.start(now, path, size, through)

    def _deliver(self, target: int, what: Any) -> None:
        """Put a message into its receiver's mail."""
        source, mail = what
        self.mail[target].setdefault(source, []).append(mail)
        waiting = self.exchanging.get(target)
        if waiting is not None:
            waiting.missing.discard(source)
            self._complete_if_done(self.clock.now, waiting)

    def _complete_if_done(self, now: float, waiting: _Waiting) -> None:
        """End a round when the last expected message has come and the last own one has left."""
        rank = waiting.lane.rank
        if waiting.missing or waiting.leaving or self.exchanging.get(rank) is not waiting:
            return
        del self.exchanging[rank]
        operation = waiting.operation
        frames, received = [], 0
        for peer, capacity in operation.receive:
            frame, size = self._open(rank, peer)
            if size > capacity:
                told = f"rank {peer} sent {size} bytes to rank {rank}, which expected {capacity}."
                raise ProtocolError(told, peer=peer)
            frames.append(frame)
            received += size
        self.driver.traffic[rank].count(
            rounds=1, messages=len(operation.send), sent=waiting.sent, received=received, seconds=0
        )
        self._note(rank, operation.name, waiting.began, now, computing=False)
        seconds = self.driver.machine.seconds(rank, self.driver.machine.costs.per_byte * received)
        self._resume(waiting.lane, self.cores.until(now, seconds), frames)

    def _open(self, rank: int, peer: int) -> _Mail:
        """Take the oldest message from a peer out of a rank's mail, where no empty list stays behind."""
        messages = self.mail[rank].pop(peer)
        oldest = messages.pop(0)
        if messages:
            self.mail[rank][peer] = messages
        return oldest

    # --- all-reduces ----------------------------------------------------------------------------------------------

    def _reduce(self, now: float, lane: Lane, operation: AllReduce) -> None:
        """Sum in rank order once all ranks have come; time and bytes are those of a ring."""
        self.reducing[lane.rank] = (lane, operation)
        count = len(self.lanes)
        if len(self.reducing) < count:
            return
        members = [self.reducing.pop(member) for member in range(count)]
        tensors = [each.tensor for _, each in members]
        total = sum_in_order(tensors)
        size = total.numel() * total.element_size()
        end = now + self._ring_seconds(count, size)
        for (member, _), tensor in zip(members, tensors, strict=True):
            tensor.copy_(total)
            count_ring(self.driver.traffic[member.rank], size, count, seconds=0)
            self._note(member.rank, operation.name, now, end, computing=False)
            self._resume(member, end, None)

    def _ring_seconds(self, count: int, size: int) -> float:
        """How long a ring over `size` bytes takes: 2(count - 1) times the slowest message of one round.

        What sending and receiving a message costs its host is part of it.
        """
        if count == 1:
            return 0.0
        network, machine, piece = self.driver.network, self.driver.machine, size / count
        clock, arrivals = Clock(), list[float]()
        flows = Flows(clock)
        cores = Cores(machine.cores)
        own = machine.costs.per_round + 2 * machine.costs.per_byte * piece

        def message(rank: int, begin: float) -> None:
            path = network.path(rank, (rank + 1) % count)
            for link in path:
                self.driver.carried[link] = self.driver.carried.get(link, 0.0) + piece * ring_steps(count)
            late = travel_time(path, piece)
            flows.start(begin, path, piece, lambda: arrivals.append(clock.now + late))

        for rank in range(count):
            begin = cores.until(0.0, machine.seconds(rank, own))
            clock.at(begin, rank, message, begin)
        clock.run()
        return ring_steps(count) * max(arrivals)

    def _deadlock(self) -> str:
        stuck = {rank: f"rank {rank} in {operation.name} for all" for rank, (_, operation) in self.reducing.items()}
        for rank, waiting in self.exchanging.items():
            missing = [str(peer) for peer, _ in waiting.operation.receive if peer in waiting.missing]
            stuck[rank] = f"rank {rank} in {waiting.operation.name} for {', '.join(missing)}"
        return "; ".join(stuck[rank] for rank in sorted(stuck)[:4])
