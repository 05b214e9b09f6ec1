"""DEFT: budgets that follow the norms of layers, and layers packed so that all workers select equally long.

Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient Sparsification",
ICPP 2023. The model is cut into pieces (tensors; large ones into several). In turn, one worker weighs the pieces by
the norm of its own accumulator and deals them to as many bins as there are workers; each worker selects in one bin, so
no coordinate is selected twice, and everybody contributes its value wherever anybody selected.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from spardl.collectives.common_support import gather_support, sum_at
from spardl.collectives.method import About, NoOptions, Seat
from spardl.collectives.numbers import all_gather_numbers, row
from spardl.collectives.price import Price
from spardl.collectives.program import Program, Team, known
from spardl.collectives.snapshot import Snapshot
from spardl.memory.layout import BlockLayout, entries

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import Ints, SparseBlocks


class Deft:
    """1 + 3 ceil(log2 P) rounds; k (P-1)/P indices and 2k (P-1)/P values from each worker, and a number per piece."""

    about: ClassVar[About] = About(
        "Yoon and Oh, ICPP 2023",
        rounds=Price("1 + 3*ceil(log2(P))"),
        entries=Price("k*(P-1)/P"),
        note="indices, and twice as many values; one round has P-1 messages",
    )
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, seat: Seat) -> None:
        self.team, self.workers = seat.team, seat.workers
        self.layout = BlockLayout.contiguous(seat.length, 1)
        self.pieces = cut_into_pieces(seat.sizes or (seat.length,), seat.workers)
        self.step = 0

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        team = self.team.rotated(self.step)  # bin b is held by the worker at place b; the holder of the first one leads
        memory.repartition(self.pieces)
        budgets, poisoned = yield from self._budgets(team, memory, density)
        if poisoned:  # known to all at once, so all leave here
            memory.health.poison()
            return memory.nothing(np.arange(len(self.pieces) - 1))
        support = yield from self._union(team, memory, budgets)
        total = yield from sum_at(team, memory, support)
        if not memory.health.known_poisoned:  # if a device knows of any, the step will be undone
            self.step += 1
        return memory.addresses.in_order(total)

    def _budgets(self, team: Team, memory: Memory, density: float) -> Program[tuple[Ints, bool]]:
        """Every piece's share of the budget, by the norms that this step's leader sees; the same on all workers."""
        lengths = np.diff(self.pieces)
        mine = np.zeros(len(lengths), np.int64)
        leads = team.position == 0 and not memory.health.known_poisoned
        bits = yield from known(memory.survey.bits_of_norms() if leads else memory.algebra.zeros(0))
        if leads:
            mine = share_out(bits.view(np.float64), lengths, entries(density, self.layout.length))
        rows = yield from all_gather_numbers(team, row(memory.health.poisoned, mine), "budgets")
        return np.clip(rows[0, 1:], 0, lengths), bool(rows[:, 0].any())

    def _union(self, team: Team, memory: Memory, budgets: Ints) -> Program[SparseBlocks]:
        """The coordinates that each worker chose in its bin, worker by worker: only indices travel.

        A bin is scattered over the vector, so its indices are coded over all of it.
        """
        bins = pack_into_bins(np.diff(self.pieces), budgets, self.workers)
        mine = bins[team.position]
        chosen = memory.find_largest(mine, budgets[mine])
        memory.repartition(self.layout.starts)
        limits = np.array([budgets[bin_].sum() for bin_ in bins])
        addressed = memory.addresses.in_present_blocks(chosen, self.pieces)
        return (yield from gather_support(team, memory, addressed, np.zeros_like(limits), limits))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = Snapshot("DEFT", state).count("step")


def cut_into_pieces(sizes: tuple[int, ...], workers: int) -> Ints:
    """Boundaries of the pieces: a tensor each, but tensors over an equal share are cut into as many as workers."""
    share = sum(sizes) / workers
    lengths: list[int] = []
    for size in sizes:
        parts = min(workers, size) if size > share else 1
        lengths += np.diff(np.arange(parts + 1) * size // parts).tolist() if parts else []
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def share_out(norms: NDArray[np.float64], lengths: Ints, budget: int) -> Ints:
    """`budget` entries by norm, largest first, at least one each and no more than a piece holds, while they last."""
    order = np.argsort(-norms, kind="stable")
    shares = np.zeros(len(norms), np.int64)
    left, norm_left = budget, float(norms.sum())
    for i in order:
        wanted = int(left * norms[i] / norm_left) if norm_left > 0 else 0
        shares[i] = min(max(wanted, 1), lengths[i], left)
        left -= int(shares[i])
        norm_left -= float(norms[i])
    for i in order:  # what full pieces could not take
        more = min(left, int(lengths[i] - shares[i]))
        shares[i] += more
        left -= more
    return shares


def pack_into_bins(lengths: Ints, budgets: Ints, workers: int) -> list[Ints]:
    """Pieces in bins of about equal selection time: the costliest piece goes to the emptiest bin."""
    costs = lengths * np.log2(np.maximum(budgets, 2))
    bins: list[list[int]] = [[] for _ in range(workers)]
    loads = [(0.0, bin_) for bin_ in range(workers)]
    for piece in np.argsort(-costs, kind="stable"):
        load, bin_ = heapq.heappop(loads)
        bins[bin_].append(int(piece))
        heapq.heappush(loads, (load + float(costs[piece]), bin_))
    return [np.array(sorted(bin_), np.int64) for bin_ in bins]
