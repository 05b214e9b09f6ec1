"""What a collective is: a generator that yields what this rank sends and expects, and is sent what arrived.

It opens no socket, knows no thread and measures no time; a transport drives it. `yield from` composes programs.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from spardl.sparse import Array

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Round:
    """One message to each of some peers, one from each of some peers. The program is sent the list of arrived frames.

    Frames are bytes, as numpy arrays or tensors, whichever the sender and the transport have.

    `receive` names the capacity of each message, so that no size travels ahead. `name` is for people; both sides of a
    message use the same, by which transports may notice ranks that run different programs. `meanwhile` is work that
    this rank has to do anyway and that no message of the round depends on: it is done while they travel.
    """

    send: list[tuple[int, Array]]
    receive: list[tuple[int, int]]
    name: str
    meanwhile: Callable[[], None] | None = None

    def use_the_time(self) -> float:
        """For transports, when all messages have left: do what can be done meanwhile. Seconds that it took."""
        if self.meanwhile is None:
            return 0.0
        started = perf_counter()
        self.meanwhile()
        return perf_counter() - started


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum `tensor` over all ranks in place, by whatever the transport does best. The program is sent nothing."""

    tensor: Tensor
    name: str = "all_reduce"


Operation = Round | AllReduce
Program = Generator[Operation, Any, Result]


@dataclass(frozen=True, slots=True)
class Team:
    """Some ranks in order, seen from the member at `position`."""

    ranks: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def member(self, distance: int) -> int:
        """The rank at this distance round the ring."""
        return self.ranks[(self.position + distance) % self.size]

    def exchange(
        self,
        frame: Array,
        *,
        to: int,
        source: int,
        capacity: int,
        name: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> Round:
        """Send to the member at distance `to`, receive from the one at distance `source`."""
        return Round([(self.member(to), frame)], [(self.member(source), capacity)], name, meanwhile)
