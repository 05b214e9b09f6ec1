"""Dense all-reduce: every entry, every step. What every sparse method is measured against.

`dense` is the transport's own. The ring and recursive halving and doubling are programs, so that the simulated network
times what they really send. All of them sum a given element in one place, so all ranks hold the same bits.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

from spardl.collectives.method import About, Seat, Stateless
from spardl.collectives.price import Price
from spardl.collectives.program import AllReduce, Message, Program, Round, Team
from spardl.memory.layout import BlockLayout

if TYPE_CHECKING:
    from torch import Tensor

    from spardl.memory.frames import Frames
    from spardl.memory.memory import Memory


def ring_all_reduce(team: Team, frames: Frames, vector: Tensor) -> Program[None]:
    """Sum `vector` over the team in place: 2(m - 1) rounds of one m-th each, the least that any dense method sends.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    pieces = [vector[first:last] for first, last in itertools.pairwise(_edges(vector, team.size))]
    for turn in range(2 * (team.size - 1)):
        leaving = pieces[(team.position - turn) % team.size]
        arriving = pieces[(team.position - turn - 1) % team.size]
        (frame,) = yield team.exchange(
            frames.pack_floats(leaving),
            to=1,
            source=-1,
            send_capacity=_size(leaving),
            receive_capacity=_size(arriving),
            name="ring",
        )
        if turn < team.size - 1:
            arriving += frames.unpack_floats(frame, arriving.numel(), team.member(-1))
        else:
            arriving.copy_(frames.unpack_floats(frame, arriving.numel(), team.member(-1)))


def halving_doubling_all_reduce(team: Team, frames: Frames, vector: Tensor) -> Program[None]:
    """Sum `vector` over the team in place: 2 log2 m rounds for a power of two; otherwise the surplus folds in and out.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    core = 1 << (team.size.bit_length() - 1)
    surplus = team.size - core
    if team.position >= core:
        partner = team.ranks[team.position - core]
        yield Round([_message(frames, partner, vector)], [], "fold in")
        (frame,) = yield Round([], [(partner, _size(vector))], "fold out")
        vector.copy_(frames.unpack_floats(frame, vector.numel(), partner))
        return
    folded = team.ranks[core + team.position] if team.position < surplus else None
    if folded is not None:
        (frame,) = yield Round([], [(folded, _size(vector))], "fold in")
        vector += frames.unpack_floats(frame, vector.numel(), folded)
    yield from _halve_and_double(Team(team.ranks[:core], team.position), frames, vector)
    if folded is not None:
        yield Round([_message(frames, folded, vector)], [], "fold out")


def _halve_and_double(team: Team, frames: Frames, vector: Tensor) -> Program[None]:
    """Halve the stretch that this member is responsible for until it is one m-th, then double it again."""
    edges = _edges(vector, team.size)
    first, last = 0, team.size
    history = []
    while last - first > 1:
        middle = (first + last) // 2
        gap = middle - first
        upper = team.position >= middle
        mine, theirs = ((middle, last), (first, middle)) if upper else ((first, middle), (middle, last))
        partner = team.ranks[team.position - gap if upper else team.position + gap]
        keep, give = (vector[edges[begin] : edges[end]] for begin, end in (mine, theirs))
        (frame,) = yield Round([_message(frames, partner, give)], [(partner, _size(keep))], "halving")
        keep += frames.unpack_floats(frame, keep.numel(), partner)
        history.append((partner, keep, give))
        first, last = mine
    for partner, keep, give in reversed(history):
        (frame,) = yield Round([_message(frames, partner, keep)], [(partner, _size(give))], "doubling")
        give.copy_(frames.unpack_floats(frame, give.numel(), partner))


class Dense(Stateless):
    """The transport's own all-reduce over everything. Values travel as float32."""

    about: ClassVar[About] = About(
        paper="the transport's own",
        rounds=Price("2*(P-1)"),
        entries=Price("2*n*(P-1)/P"),
        note="as of a ring; without indices",
        dense=True,
    )

    def __init__(self, seat: Seat) -> None:
        self.team = seat.team
        self.layout = BlockLayout.contiguous(seat.length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield AllReduce(memory.everything())


class DenseRing(Dense):
    """Everything, summed by a ring of our own messages. Values travel as float32."""

    about: ClassVar[About] = About(
        "Patarasuk and Yuan, JPDC 2009", Price("2*(P-1)"), Price("2*n*(P-1)/P"), note="without indices", dense=True
    )

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield from ring_all_reduce(self.team, memory.frames, memory.everything())


class DenseHalvingDoubling(Dense):
    """Everything, summed by recursive halving and doubling of our own messages. Values travel as float32."""

    about: ClassVar[About] = About(
        "Thakur et al., IJHPCA 2005",
        rounds=Price("2*ceil(log2(P))"),
        entries=Price("2*n*(P-1)/P", "3*n"),
        note="the most where P is no power of two; without indices",
        dense=True,
    )

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield from halving_doubling_all_reduce(self.team, memory.frames, memory.everything())


def _edges(vector: Tensor, count: int) -> list[int]:
    """Where `count` pieces of about equal length begin and end."""
    return [vector.numel() * i // count for i in range(count + 1)]


def _message(frames: Frames, peer: int, values: Tensor) -> Message:
    return Message(peer, frames.pack_floats(values), _size(values))


def _size(values: Tensor) -> int:
    return values.numel() * values.element_size()
