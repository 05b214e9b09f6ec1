"""ExDyna: each coordinate is judged by one worker, against one threshold that follows the target.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning", CCGrid 2024.
Partitions are disjoint and rotate over the workers, so the union of all selections has no duplicates and needs no
top-k; they move so that all select as many; and everybody contributes its value wherever anybody selected, so error
feedback is exact. MiCRO ("MiCRO: Near-Zero Cost Gradient Sparsification", HiPC 2023) is the same with fixed partitions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spardl.choices import setting
from spardl.collectives.common_support import gather_support, sum_at
from spardl.collectives.method import About, NoOptions, Seat
from spardl.collectives.numbers import all_gather_numbers, row
from spardl.collectives.partition import Partition
from spardl.collectives.price import Price
from spardl.collectives.program import Ask, Program, Team
from spardl.collectives.snapshot import Snapshot
from spardl.collectives.threshold import BINS, CONTROLLERS, SHIFT, Controller, first_bin
from spardl.memory.layout import BlockLayout, entries

if TYPE_CHECKING:
    from spardl.memory.memory import Memory
    from spardl.sparse import Ints, SparseBlocks

LARGEST_BITS = 0x7F7FFFFF  # of a finite float32
BURST = 4  # times its fair share: what a worker selects at the most, however wrong the threshold is


@dataclass(frozen=True)
class ThresholdOptions(NoOptions):
    """What can be chosen about methods that select by one threshold."""

    threshold: str = setting(
        "quantile",
        "how the density is held: by a quantile with trend, or by the published rule",
        choices=tuple(CONTROLLERS),
    )


@dataclass(frozen=True)
class ExDynaOptions(ThresholdOptions):
    """What can be chosen about ExDyna."""

    rebalance: str = setting(
        "prefix",
        "how partitions move: prefix gives equal shares, neighbour moves a block a step, as published",
        choices=("prefix", "neighbour"),
    )


class SharedThreshold:
    """One threshold for all groups of a model. It learns when a group comes round again: then a step is complete."""

    def __init__(self, make: Callable[[float], Controller]) -> None:
        self.controller: Controller | None = None
        self.is_sought = False  # by a group whose first step is under way
        self._make = make
        self._seen: dict[str, tuple[int, int, Ints]] = {}

    @contextlib.contextmanager
    def sought(self) -> Iterator[None]:
        """Other groups wait meanwhile for what this one finds."""
        self.is_sought = True
        try:
            yield
        finally:
            self.is_sought = False

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

    def load_state_dict(self, saved: Snapshot) -> None:
        controller = self._make(1.0) if saved.maybe("controller") else None
        if controller is not None:
            controller.load_state_dict(saved.part("controller"))
        seen = saved.part("seen")
        rows = {name: seen.counts(name, count=2 + BINS) for name in seen.names()}
        self.controller = controller
        self._seen = {name: (int(row[0]), int(row[1]), row[2:]) for name, row in rows.items()}


class ExDyna:
    """1 + 3 ceil(log2 P) rounds; k (P-1)/P indices and 2k (P-1)/P values from each worker."""

    about: ClassVar[About] = About(
        "Yoon and Oh, CCGrid 2024",
        rounds=Price("1 + 3*ceil(log2(P))"),
        entries=Price("k*(P-1)/P"),
        note="indices, and twice as many values; one round has P-1 messages",
    )
    Options: ClassVar[type[NoOptions]] = ExDynaOptions

    def __init__(self, seat: Seat) -> None:
        assert isinstance(seat.options, ThresholdOptions)
        self.team, self.workers = seat.team, seat.workers
        self.layout = BlockLayout.contiguous(seat.length, 1)
        self.partition = Partition(seat.length, seat.workers, getattr(seat.options, "rebalance", "none"))
        self.step = 0
        self._name = seat.name
        fresh = SharedThreshold(CONTROLLERS[seat.options.threshold])
        self._shared: SharedThreshold = seat.common.setdefault("threshold", fresh)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        target = entries(density, self.layout.length)
        team = self.team.rotated(self.step)  # partition q is held by the worker at place q
        memory.repartition(self.partition.starts)
        self._shared.turn(self._name)
        threshold = yield from self._threshold(team, memory, target)
        histogram = memory.survey.count_bins(team.position, first_bin(threshold), SHIFT, BINS)
        limit = -(-BURST * target // self.workers) if target < self.layout.length else target
        found = memory.find_above(team.position, threshold, limit)
        rows = yield from all_gather_numbers(team, row(memory.health.poisoned, found.count, histogram), "counts")
        if rows[:, 0].any():  # known to all at once, so all leave here
            memory.health.poison()
            return memory.nothing(np.arange(self.workers))
        counts = rows[:, 1]
        limits = np.clip(counts, 0, memory.lengths)
        chosen = found.entries(int(limits[team.position]))
        support = yield from gather_support(team, memory, chosen, np.arange(team.size), limits)
        total = yield from sum_at(team, memory, support)
        if not memory.health.known_poisoned:  # if a device knows of any, what is learned here will be undone
            self._shared.note(self._name, len(support), target, rows[:, 2:].sum(0))
            tally = self.partition.tally(memory.addresses.positions(support))
            memory.health.ask(tally, functools.partial(self.partition.learn, counts))
            self.step += 1
        return total

    def _threshold(self, team: Team, memory: Memory, target: int) -> Program[float]:
        """The threshold in force; the first one is the quantile of a sample, agreed by all."""
        shared = self._shared
        if target == self.layout.length:
            return 0.0
        while shared.is_sought:  # by another group of this step, which waits for a device
            yield Ask(memory.algebra.zeros(0))
        if shared.controller is None:
            with shared.sought():
                agreed = yield from self._first_threshold(team, memory, target)
                if agreed == 0.0:  # nothing to judge by yet
                    return agreed
                shared.start(agreed)
        assert shared.controller is not None
        return shared.controller.threshold

    def _first_threshold(self, team: Team, memory: Memory, target: int) -> Program[float]:
        """The median of what all workers would choose; a poisoned one chooses 0."""
        bits = memory.survey.bits_of_magnitude(target)
        poisoned = memory.health.poisoned
        mine = bits * (not poisoned) if isinstance(poisoned, bool) else bits.masked_fill(poisoned, 0)
        rows = yield from all_gather_numbers(team, mine, "first threshold")
        agreed = int(np.median(np.clip(rows, 0, LARGEST_BITS)))  # whatever a peer has sent
        return float(np.uint32(agreed).view(np.float32))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "partition": self.partition.state_dict(),
            "threshold": self._shared.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = Snapshot("ExDyna", state)
        step = saved.count("step")
        self.partition.load_state_dict(saved.part("partition"))
        self._shared.load_state_dict(saved.part("threshold"))
        self.step = step


class MiCRO(ExDyna):
    """ExDyna with partitions that stay where they are."""

    about: ClassVar[About] = replace(ExDyna.about, paper="Yoon and Oh, HiPC 2023")
    Options: ClassVar[type[NoOptions]] = ThresholdOptions
