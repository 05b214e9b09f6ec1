"""ExDyna: each coordinate is judged by one worker, against one threshold that follows the target.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning", CCGrid 2024.
Partitions are disjoint and rotate over the workers, so the union of all selections has no duplicates and needs no
top-k; they move so that all select as many; and everybody contributes its value wherever anybody selected, so error
feedback is exact. MiCRO ("MiCRO: Near-Zero Cost Gradient Sparsification", HiPC 2023) is the same with fixed partitions.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from spardl.blocks import BlockLayout, entries
from spardl.collectives.all_gather import bruck_all_gather
from spardl.collectives.common_support import sum_at
from spardl.collectives.memory import Memory
from spardl.collectives.method import About, Place
from spardl.collectives.numbers import all_gather_numbers
from spardl.collectives.partition import Partition
from spardl.collectives.program import Program, Team
from spardl.collectives.threshold import BINS, CONTROLLERS, SHIFT, Controller, first_bin
from spardl.sparse import Ints, SparseBlocks
from spardl.wire.frame import CodedBlocks

BURST = 4  # times its fair share: what a worker selects at the most, however wrong the threshold is
SAMPLE = 1 << 16


class SharedThreshold:
    """One threshold for all groups of a model. It learns when a group comes round again: then a step is complete."""

    def __init__(self, make: Callable[[float], Controller]) -> None:
        self.controller: Controller | None = None
        self._make = make
        self._seen: dict[str, tuple[int, int, Ints]] = {}

    def start(self, threshold: float) -> None:
        self.controller = self._make(threshold)

    def turn(self, group: str) -> None:
        """This group begins its next step."""
        if group not in self._seen:
            return
        if self.controller is not None:
            selected, targets, histograms = zip(*self._seen.values(), strict=True)
            self.controller.learn(sum(selected), sum(targets), np.sum(histograms, axis=0))
        self._seen.clear()

    def note(self, group: str, selected: int, target: int, histogram: Ints) -> None:
        self._seen[group] = (selected, target, histogram)

    def state_dict(self) -> dict[str, Any]:
        return {
            "controller": None if self.controller is None else self.controller.state_dict(),
            "seen": {name: [selected, target, *bins.tolist()] for name, (selected, target, bins) in self._seen.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller = None
        if state["controller"] is not None:
            self.controller = self._make(1.0)
            self.controller.load_state_dict(state["controller"])
        self._seen = {
            name: (selected, target, np.asarray(bins, np.int64))
            for name, (selected, target, *bins) in state["seen"].items()
        }


class ExDyna:
    """1 + 3 ceil(log2 P) rounds; k (P-1)/P indices and 2k (P-1)/P values from each worker."""

    about: ClassVar[About] = About(
        "Yoon and Oh, CCGrid 2024", "1 (of P-1 messages) + 3 ceil(log2 P)", "k (P-1)/P indices + 2k (P-1)/P values"
    )
    moves: ClassVar[bool] = True

    def __init__(self, place: Place) -> None:
        self.rank, self.workers = place.rank, place.workers
        self.layout = BlockLayout.contiguous(place.length, 1)
        self.partition = Partition(place.length, place.workers, place.config.rebalance if self.moves else "none")
        self.step = 0
        self._name = place.name
        fresh = SharedThreshold(CONTROLLERS[place.config.threshold])
        self._shared: SharedThreshold = place.common.setdefault("threshold", fresh)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        target = entries(density, self.layout.length)
        # Partition q is held by the worker at place q of this step's team.
        holders = tuple((q - self.step) % self.workers for q in range(self.workers))
        team = Team(holders, (self.rank + self.step) % self.workers)
        memory.acc.repartition(self.partition.starts)
        self._shared.turn(self._name)
        threshold = yield from self._threshold(team, memory, target)
        histogram = memory.acc.count_bins(team.position, first_bin(threshold), SHIFT, BINS)
        limit = -(-BURST * target // self.workers) if target < self.layout.length else target
        chosen = memory.acc.find_above(team.position, threshold, limit)
        rows = yield from all_gather_numbers(team, [memory.acc.poisoned, len(chosen), *histogram], "counts")
        if rows[:, 0].any():  # known to all at once, so all leave here
            memory.acc.poisoned = True
            return SparseBlocks.empty(np.arange(self.workers), memory.acc.device)
        counts = rows[:, 1]
        support = yield from self._union(team, memory, chosen, counts)
        total = yield from sum_at(team, memory, support)
        if not memory.acc.poisoned:
            self._shared.note(self._name, len(support), target, rows[:, 2:].sum(0))
            self.partition.learn(counts, memory.acc.positions(support).cpu().numpy())
            self.step += 1
        return total

    def _threshold(self, team: Team, memory: Memory, target: int) -> Program[float]:
        """The threshold in force; the first one is the quantile of a sample, agreed by all."""
        shared = self._shared
        if target == self.layout.length:
            return 0.0
        if shared.controller is None:
            sample = memory.acc.values[:: max(1, self.layout.length // SAMPLE)].abs()
            rank = max(1, round(sample.numel() * target / self.layout.length))
            guess = float(torch.topk(sample, rank).values[-1]) if not memory.acc.poisoned else 0.0
            bits = int(np.float32(guess).view(np.uint32))
            rows = yield from all_gather_numbers(team, [bits], "first threshold")
            agreed = float(np.uint32(int(np.median(rows))).view(np.float32))
            if agreed == 0.0:  # nothing to judge by yet
                return agreed
            shared.start(agreed)
        assert shared.controller is not None
        return shared.controller.threshold

    def _union(self, team: Team, memory: Memory, chosen: SparseBlocks, counts: Ints) -> Program[SparseBlocks]:
        """The coordinates that all holders chose, partition by partition: only indices travel."""
        indices = memory.without_values()
        limits = np.clip(counts, 0, memory.lengths)
        mine = indices.code(chosen)
        pieces = yield from bruck_all_gather(team, indices, mine, np.arange(team.size), limits, name="indices")
        return CodedBlocks.join(pieces).decode()

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "partition": self.partition.state_dict(),
            "threshold": self._shared.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.partition.load_state_dict(state["partition"])
        self._shared.load_state_dict(state["threshold"])


class MiCRO(ExDyna):
    about: ClassVar[About] = About(
        "Yoon and Oh, HiPC 2023", "1 (of P-1 messages) + 3 ceil(log2 P)", "k (P-1)/P indices + 2k (P-1)/P values"
    )
    moves: ClassVar[bool] = False
