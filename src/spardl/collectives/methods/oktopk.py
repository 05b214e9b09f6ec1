"""Ok-Topk: thresholds that are reused, regions that follow the data, and a result of about k entries.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022. Every `PERIOD` steps the
exact k-th magnitudes, local and global, become the thresholds; in between, they are nudged so that counts stay near k.
Every `REPARTITION` steps the regions are redrawn so that each owner receives as many entries. Values travel straight
to their region's owner, so what it does not pass on is all there is of that coordinate: nothing is lost.
The released code searches an unsorted list here and casts indices to float32; both lose entries.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spardl.collectives.balance import deal_evenly, join
from spardl.collectives.bruck import gather_blocks, gather_joined
from spardl.collectives.method import About, NoOptions, Seat
from spardl.collectives.numbers import all_gather_numbers, row
from spardl.collectives.owners import send_to_owners, sort_for_owners
from spardl.collectives.price import Price
from spardl.collectives.program import Program, known
from spardl.collectives.snapshot import FLOAT32, Snapshot
from spardl.memory.layout import BlockLayout, entries
from spardl.sparse import split

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import Array, Ints, SparseBlocks

PERIOD = 32
REPARTITION = 64
CORRECTIONS = 5
LIMIT = 2  # times k: what a worker sends at the most, however wrong its threshold is
IMBALANCE = 4  # times the mean: an owner that passes on more than this shares it out before the gather


class OkTopk:
    """1 + 2 ceil(log2 P) rounds, one more to balance; about 2k (P-1)/P entries if balanced, up to 6k (P-1)/P."""

    about: ClassVar[About] = About(
        "Li and Hoefler, PPoPP 2022",
        rounds=Price("1 + 2*ceil(log2(P))", "2 + 2*ceil(log2(P))"),
        entries=Price("2*k*(P-1)/P", "6*k*(P-1)/P"),
        note="the first round has P-1 messages; a round more where regions are uneven",
    )
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, seat: Seat) -> None:
        self.team = seat.team
        self.layout = BlockLayout.contiguous(seat.length, 1)
        self.bounds = np.arange(seat.workers + 1) * seat.length // seat.workers
        self.step = 0
        self.local = 0.0
        self.overall = 0.0

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        k = entries(density, self.layout.length)
        exact = self.step % PERIOD == 0
        memory.repartition(self.bounds)
        mine = yield from self._select(memory, k, exact)
        if self.step % REPARTITION == 0:
            yield from self._repartition(memory, mine)
        limits = np.minimum(LIMIT * k, np.diff(self.bounds))
        coded, counts = yield from sort_for_owners(self.team, memory, mine, limits)
        versions = yield from send_to_owners(self.team, memory.frames, coded, counts, full=True)
        result = yield from self._gather(memory, memory.algebra.sum(versions), k, exact)
        if not memory.health.known_poisoned:
            self._learn(k, len(mine), len(result), exact)
        return result

    def _select(self, memory: Memory, k: int, exact: bool) -> Program[SparseBlocks]:
        """What this worker offers: its k largest entries, or those above the threshold that it reuses."""
        if not exact:
            return (yield from self._above(memory, k))
        taken = memory.take_largest_of_all(k)

        def learn(bits: Ints) -> None:
            self.local = _float(bits)

        memory.health.ask(memory.algebra.smallest(taken), learn)
        return taken

    def _above(self, memory: Memory, k: int) -> Program[SparseBlocks]:
        """Entries above the threshold, which is raised where far more than k are. A device counts for all at once."""
        tried = list(itertools.accumulate([1.03] * CORRECTIONS, operator.mul, initial=self.local))
        counts: Iterable[int] = (memory.survey.count_above(threshold) for threshold in tried)
        if memory.fills:
            counts = (yield from known(memory.survey.counts_above(tried))).tolist()
        at = next((i for i, count in zip(range(CORRECTIONS), counts, strict=False) if count <= 4 * k / 3), CORRECTIONS)
        self.local = tried[at]
        limit = min(LIMIT * k, counts[at]) if isinstance(counts, list) else LIMIT * k
        return memory.take_above_of_all(self.local, limit, counted=True)

    def _repartition(self, memory: Memory, mine: SparseBlocks) -> Program[None]:
        """Boundaries that would share out this worker's entries evenly, averaged over workers."""
        from spardl.host import upload  # when it is used: the command line lists methods without torch

        positions = mine.indices
        cuts = upload(np.arange(1, self.team.size) * len(positions) // self.team.size, positions.device)
        wanted: Array = positions[cuts] if len(positions) else self.bounds[1:-1]
        everyone = yield from all_gather_numbers(self.team, wanted, "boundaries")
        means = np.clip(everyone.sum(0) // self.team.size, 0, self.layout.length)  # whatever a peer has sent
        self.bounds = np.concatenate(([0], np.maximum.accumulate(means), [self.layout.length])).astype(np.int64)
        memory.repartition(self.bounds)

    def _gather(self, memory: Memory, total: SparseBlocks, k: int, exact: bool) -> Program[SparseBlocks]:
        """Share what each owner passes on: all of it when the threshold is to be found, what exceeds it otherwise."""
        if exact:
            found = memory.algebra.without_zeros(total)
        else:
            found, dropped = memory.algebra.part_above(total, self.overall)
            memory.give_back(dropped)
        counts = (yield from all_gather_numbers(self.team, row(found.count), "counts"))[:, 0]
        limits = np.minimum(np.maximum(counts, 0), np.diff(self.bounds))
        kept = found.entries(int(limits[self.team.position]))
        if not exact and limits.max() > IMBALANCE * limits.mean():
            return (yield from self._gather_evenly(memory, kept, limits))
        mine = memory.frames.code(kept)
        everyone = np.arange(self.team.size)
        gathered = yield from gather_joined(self.team, memory.frames, mine, everyone, limits, full=True)
        union = gathered.decode()
        return (yield from self._cut(memory, union, k)) if exact else union

    def _gather_evenly(self, memory: Memory, kept: SparseBlocks, counts: Ints) -> Program[SparseBlocks]:
        """Deal out what the owners pass on in equal slices, regardless of regions, and share those."""
        memory.repartition(np.array([0, self.layout.length]))
        mine = memory.addresses.in_present_blocks(kept, self.bounds)
        mine, sizes = yield from deal_evenly(self.team, memory, mine, counts)
        coded = memory.frames.code(mine)
        pieces = yield from gather_blocks(self.team, memory.frames, coded, np.zeros_like(sizes), sizes, full=True)
        return join(self.team, memory, {member: piece.decode() for member, piece in enumerate(pieces)})

    def _cut(self, memory: Memory, union: SparseBlocks, k: int) -> Program[SparseBlocks]:
        """The k largest of all regions; each owner keeps what its own region loses."""
        algebra = memory.algebra
        largest = algebra.largest_of_all(union, k)
        found = yield from known(row(algebra.counts(union, largest), algebra.smallest(union, largest)))
        kept, self.overall = found[:-1], _float(found[-1:])
        dropped = algebra.where(union, ~largest, union.counts - kept)
        memory.give_back(split(dropped)[self.team.position])
        return algebra.where(union, largest, kept)

    def _learn(self, k: int, offered: int, agreed: int, exact: bool) -> None:
        self.step += 1
        if offered < 2 * k / 3:
            self.local /= 1.012
        elif offered > 5 * k / 4:
            self.local *= 1.012
        if exact:
            return
        if agreed < 2 * k / 3:
            self.overall /= 1.008
        elif agreed > 4 * k / 3:
            self.overall *= 1.008

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "local": self.local, "overall": self.overall, "bounds": self.bounds.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = Snapshot("Ok-Topk", state)
        bounds = saved.boundaries("bounds", count=self.team.size, last=self.layout.length)
        local, overall = (saved.number(name, least=0.0, most=FLOAT32) for name in ("local", "overall"))
        self.step, self.local, self.overall, self.bounds = saved.count("step"), local, overall, bounds


def _float(bits: Ints) -> float:
    """The float32 that a whole number is the bits of."""
    return float(bits.astype(np.int32).view(np.float32)[0])
