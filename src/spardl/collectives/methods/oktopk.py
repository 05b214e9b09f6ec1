"""Ok-Topk: thresholds that are reused, regions that follow the data, and a result of about k entries.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022. Every `PERIOD` steps the
exact k-th magnitudes, local and global, become the thresholds; in between, they are nudged so that counts stay near k.
Every `REPARTITION` steps the regions are redrawn so that each owner receives as many entries. Values travel straight
to their region's owner, so what it does not pass on is all there is of that coordinate: nothing is lost.
The released code searches an unsorted list here and casts indices to float32; both lose entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spardl.collectives.balance import deal_evenly, join
from spardl.collectives.bruck import gather_blocks, gather_joined
from spardl.collectives.method import About, NoOptions, Seat
from spardl.collectives.numbers import all_gather_numbers
from spardl.collectives.owners import send_to_owners
from spardl.collectives.price import Price
from spardl.collectives.program import Program
from spardl.collectives.snapshot import FLOAT32, Snapshot
from spardl.memory.layout import BlockLayout, entries
from spardl.sparse import split

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import Ints, SparseBlocks

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
        mine = self._select(memory, k, exact)
        if self.step % REPARTITION == 0:
            before = self.bounds
            yield from self._repartition(memory, mine)
            mine = memory.in_present_blocks(mine, before)
        lengths, coded = np.diff(self.bounds), memory.frames.code(mine)
        versions = yield from send_to_owners(self.team, memory.frames, coded, np.minimum(LIMIT * k, lengths))
        total = memory.algebra.without_zeros(memory.algebra.sum(versions))
        result = yield from self._gather(memory, total, k, exact)
        if not memory.health.is_poisoned():
            self._learn(k, len(mine), len(result), exact)
        return result

    def _select(self, memory: Memory, k: int, exact: bool) -> SparseBlocks:
        """What this worker offers: its k largest entries, or those above the threshold that it reuses."""
        if exact:
            taken = memory.take_largest_of_all(k)
            self.local = memory.algebra.smallest(taken)
            return taken
        for _ in range(CORRECTIONS):
            if memory.survey.count_above(self.local) <= 4 * k / 3:
                break
            self.local *= 1.03
        return memory.take_above_of_all(self.local, LIMIT * k)

    def _repartition(self, memory: Memory, mine: SparseBlocks) -> Program[None]:
        """Boundaries that would share out this worker's entries evenly, averaged over workers."""
        positions = memory.positions(mine)
        cuts = np.arange(1, self.team.size) * len(positions) // self.team.size
        wanted = positions[cuts] if len(positions) else self.bounds[1:-1]
        everyone = yield from all_gather_numbers(self.team, wanted, "boundaries")
        means = np.clip(everyone.sum(0) // self.team.size, 0, self.layout.length)  # whatever a peer has sent
        self.bounds = np.concatenate(([0], np.maximum.accumulate(means), [self.layout.length])).astype(np.int64)
        memory.repartition(self.bounds)

    def _gather(self, memory: Memory, total: SparseBlocks, k: int, exact: bool) -> Program[SparseBlocks]:
        """Share what each owner passes on: all of it when the threshold is to be found, what exceeds it otherwise."""
        kept = total
        if not exact:
            kept, dropped = memory.algebra.part_above(total, self.overall)
            memory.give_back(dropped)
        counts = (yield from all_gather_numbers(self.team, [len(kept)], "counts"))[:, 0]
        limits = np.minimum(np.maximum(counts, 0), np.diff(self.bounds))
        if not exact and limits.max() > IMBALANCE * limits.mean():
            return (yield from self._gather_evenly(memory, kept, limits))
        mine = memory.frames.code(kept)
        everyone = np.arange(self.team.size)
        gathered = yield from gather_joined(self.team, memory.frames, mine, everyone, limits, full=True)
        union = gathered.decode()
        return self._cut(memory, union, k) if exact else union

    def _gather_evenly(self, memory: Memory, kept: SparseBlocks, counts: Ints) -> Program[SparseBlocks]:
        """Deal out what the owners pass on in equal slices, regardless of regions, and share those."""
        memory.repartition(np.array([0, self.layout.length]))
        mine = memory.in_present_blocks(kept, self.bounds)
        mine, sizes = yield from deal_evenly(self.team, memory, mine, counts)
        coded = memory.frames.code(mine)
        pieces = yield from gather_blocks(self.team, memory.frames, coded, np.zeros_like(sizes), sizes, full=True)
        return join(self.team, {member: piece.decode() for member, piece in enumerate(pieces)})

    def _cut(self, memory: Memory, union: SparseBlocks, k: int) -> SparseBlocks:
        """The k largest of all regions; each owner keeps what its own region loses."""
        kept, dropped = memory.algebra.cut_all(union, k)
        self.overall = memory.algebra.smallest(kept)
        memory.give_back(split(dropped)[self.team.position])
        return kept

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
