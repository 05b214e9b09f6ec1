"""Dense all-reduce: every entry, every step. What every sparse method is measured against.

`dense` is the transport's own. The ring and recursive halving and doubling are programs, so that the simulated network
times what they really send. All of them sum a given element in one place, so all ranks hold the same bits.
"""

import itertools
from typing import Any, ClassVar

import torch
from torch import Tensor

from spardl.blocks import BlockLayout
from spardl.collectives.memory import Memory
from spardl.collectives.method import About, Place
from spardl.collectives.program import AllReduce, Program, Round, Team
from spardl.wire import vector as frames


def ring_all_reduce(team: Team, vector: Tensor) -> Program[None]:
    """Sum `vector` over the team in place: 2(m - 1) rounds of one m-th each, the least that any dense method sends.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    pieces = _pieces(vector, team.size)
    for turn in range(2 * (team.size - 1)):
        leaving = pieces[(team.position - turn) % team.size]
        arriving = pieces[(team.position - turn - 1) % team.size]
        (frame,) = yield team.exchange(_bytes(leaving), to=1, source=-1, capacity=_size(arriving), name="ring")
        if turn < team.size - 1:
            arriving += frames.floats(frame, arriving.numel(), team.member(-1))
        else:
            arriving.copy_(frames.floats(frame, arriving.numel(), team.member(-1)))


def halving_doubling_all_reduce(team: Team, vector: Tensor) -> Program[None]:
    """Sum `vector` over the team in place: 2 log2 m rounds for a power of two; otherwise the surplus folds in and out.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    core = 1 << (team.size.bit_length() - 1)
    surplus = team.size - core
    if team.position >= core:
        partner = team.ranks[team.position - core]
        yield Round([(partner, _bytes(vector))], [], "fold in")
        (frame,) = yield Round([], [(partner, _size(vector))], "fold out")
        vector.copy_(frames.floats(frame, vector.numel(), partner))
        return
    folded = team.ranks[core + team.position] if team.position < surplus else None
    if folded is not None:
        (frame,) = yield Round([], [(folded, _size(vector))], "fold in")
        vector += frames.floats(frame, vector.numel(), folded)
    yield from _halve_and_double(Team(team.ranks[:core], team.position), vector)
    if folded is not None:
        yield Round([(folded, _bytes(vector))], [], "fold out")


def _halve_and_double(team: Team, vector: Tensor) -> Program[None]:
    """Halve the stretch that this member is responsible for until it is one m-th, then double it again."""
    pieces = _pieces(vector, team.size)
    first, last = 0, team.size
    history = []
    while last - first > 1:
        middle = (first + last) // 2
        gap = middle - first
        upper = team.position >= middle
        mine, theirs = ((middle, last), (first, middle)) if upper else ((first, middle), (middle, last))
        partner = team.ranks[team.position - gap if upper else team.position + gap]
        keep, give = _stretch(pieces, *mine), _stretch(pieces, *theirs)
        (frame,) = yield Round([(partner, _bytes(give))], [(partner, _size(keep))], "halving")
        keep += frames.floats(frame, keep.numel(), partner)
        history.append((partner, keep, give))
        first, last = mine
    for partner, keep, give in reversed(history):
        (frame,) = yield Round([(partner, _bytes(keep))], [(partner, _size(give))], "doubling")
        give.copy_(frames.floats(frame, give.numel(), partner))


class Dense:
    """The transport's own all-reduce over the whole accumulator. Values travel as float32."""

    about: ClassVar[About] = About(
        paper="the transport's own", rounds="2(P-1) (ring)", entries="2n (P-1)/P, without indices"
    )

    def __init__(self, place: Place) -> None:
        self.team = place.team
        self.layout = BlockLayout.contiguous(place.length, 1)

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield AllReduce(memory.acc.values)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class DenseRing(Dense):
    about: ClassVar[About] = About("Patarasuk and Yuan, JPDC 2009", "2(P-1)", "2n (P-1)/P, without indices")

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield from ring_all_reduce(self.team, memory.acc.values)


class DenseHalvingDoubling(Dense):
    about: ClassVar[About] = About(
        "Thakur et al., IJHPCA 2005", "2 log2 P, + 2 if not a power of two", "2n (P-1)/P, without indices"
    )

    def synchronize(self, memory: Memory, density: float) -> Program[None]:
        yield from halving_doubling_all_reduce(self.team, memory.acc.values)


def _pieces(vector: Tensor, count: int) -> list[Tensor]:
    edges = [vector.numel() * i // count for i in range(count + 1)]
    return [vector[first:last] for first, last in itertools.pairwise(edges)]


def _stretch(pieces: list[Tensor], first: int, last: int) -> Tensor:
    """The contiguous memory of some neighbouring pieces."""
    length = sum(piece.numel() for piece in pieces[first:last])
    return torch.as_strided(pieces[first], (length,), (1,))


def _bytes(values: Tensor) -> Tensor:
    return values.clone().view(torch.uint8)


def _size(values: Tensor) -> int:
    return values.numel() * values.element_size()
