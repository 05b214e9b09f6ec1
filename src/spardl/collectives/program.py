"""What a collective is: a generator that yields what this rank sends and expects, and is sent what arrived.

It opens no socket, knows no thread and measures no time; a transport drives it. `yield from` composes programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from spardl.sparse import Array, Ints

Result = TypeVar("Result")


class Message(NamedTuple):
    """A frame for the rank `peer`.

    `frame` is bytes, as a numpy array or a tensor, whichever the sender and the transport have. `capacity` is what the
    receiver names for this message: the frame is no longer, and a transport whose two sides must name one size fills it
    up to that.
    """

    peer: int
    frame: Array
    capacity: int


@dataclass(frozen=True, slots=True)
class Round:
    """One message to each of some peers, one from each of some peers. The program is sent the list of arrived frames.

    `receive` lists peers, each with the capacity of its message, so that no size travels ahead. `name` is for people;
    both sides of a message use the same, by which transports may notice ranks that run different programs. `meanwhile`
    is work that this rank has to do anyway and that no message of the round depends on: a transport does it when all
    messages have left, while they travel.

    What arrives may be longer than what was sent, up to the capacity; frames say for themselves how long they are.
    """

    send: list[Message]
    receive: list[tuple[int, int]]
    name: str
    meanwhile: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        for peer, frame, capacity in self.send:
            assert len(frame) <= capacity, f"{len(frame)} bytes for rank {peer} in {self.name}, of at most {capacity}"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum `tensor` over all ranks in place, by whatever the transport does best. The program is sent nothing.

    All ranks give tensors of one shape and type. It may be a sparse COO tensor, as the gradient of an embedding is:
    then its entries may differ between ranks, it need not be coalesced, and it has all ranks' entries in the end.
    """

    tensor: Tensor
    name: str = "all_reduce"


@dataclass(frozen=True, slots=True)
class Ask:
    """The host has to know whole numbers that a device computes, before the program can go on. It is sent them.

    No transport sees it: whoever drives programs answers, best for several at once (`side_by_side`), since the host
    waits for the device. All ranks ask at the same places of a program, whatever their numbers are, so that rounds of
    several programs come in one order. `numbers` may be empty: then others that are under way go on first.
    """

    numbers: Tensor


Operation = Round | AllReduce
Program = Generator[Operation | Ask, Any, Result]


def known(numbers: Array) -> Program[Ints]:
    """These whole numbers on the host, flat. Of a CPU they are at hand; a device is asked."""
    if isinstance(numbers, np.ndarray) or numbers.device.type == "cpu":
        return np.asarray(numbers, np.int64).reshape(-1)
    found: Ints = yield Ask(numbers)
    return found


def until_asked(program: Program[Any], answer: Any = None) -> Program[Ask | None]:
    """Go on with a program, which is sent `answer`, until it asks; None if it does not, and is over."""
    try:
        operation = program.send(answer)
        while not isinstance(operation, Ask):
            operation = program.send((yield operation))
    except StopIteration:
        return None
    return operation


def answers(asked: Sequence[Ask]) -> list[Ints]:
    """What several programs have asked for; the host waits once for all of them."""
    from spardl.host import ask  # when it is used: the command line lists methods without torch

    found: list[Ints] = []
    ask([(each.numbers, found.append) for each in asked])
    return found


def side_by_side(programs: Sequence[Program[Any]]) -> Program[None]:
    """Programs of one rank, one after the other, but all up to where they ask before any goes on from there: the host
    waits as often as the one that asks most often."""
    waiting: list[tuple[Program[Any], Any]] = [(program, None) for program in programs]
    while waiting:
        asking = []
        for program, answer in waiting:
            asked = yield from until_asked(program, answer)
            if asked is not None:
                asking.append((program, asked))
        found = answers([asked for _, asked in asking])
        waiting = [(program, answer) for (program, _), answer in zip(asking, found, strict=True)]


@functools.lru_cache(maxsize=4096)  # a simulation has thousands of ranks in one process, each with a team of thousands
def ranks_from(first: int, stop: int, step: int = 1) -> tuple[int, ...]:
    """The ranks of a range, in order."""
    return tuple(range(first, stop, step))


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

    def rotated(self, places: int) -> Team:
        """A team of these ranks, each of them `places` places further on, seen from the same rank."""
        ranks = tuple(self.ranks[(place - places) % self.size] for place in range(self.size))
        return Team(ranks, (self.position + places) % self.size)

    def exchange(
        self,
        frame: Array,
        *,
        to: int,
        source: int,
        send_capacity: int,
        receive_capacity: int,
        name: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> Round:
        """Send to the member at distance `to`, receive from the one at distance `source`.

        `send_capacity` is the most that `frame` may have, which its receiver names as `receive_capacity`.
        """
        message = Message(self.member(to), frame, send_capacity)
        return Round([message], [(self.member(source), receive_capacity)], name, meanwhile)
