"""Who selects where: contiguous partitions of a vector in whole blocks, moved so that all select as many entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from spardl.collectives.snapshot import Snapshot
from spardl.sparse import Ints

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 1024
ALIGNMENT = 32
EVERY = 16  # steps between two prefix rebalancings
MEMORY = 0.9  # of the histogram, from step to step
TOLERANCE = 1.05


class Partition:
    """`workers` partitions in natural order. Every rank computes the same one from the same counts; nothing is sent.

    rebalance: "none" (MiCRO), "neighbour" (ExDyna as published: a block a step across a boundary) or "prefix" (equal
    shares of a decayed histogram of where entries were selected; it does not get stuck between two full neighbours).
    """

    def __init__(self, length: int, workers: int, rebalance: str) -> None:
        self.length = length
        self.workers = workers
        self.rebalance = rebalance
        size = length // BLOCKS
        self.block = max(1, size // ALIGNMENT * ALIGNMENT if size >= ALIGNMENT else size)
        self.blocks = max(1, length // self.block)
        self.least = max(1, self.blocks // (4 * workers)) if self.blocks >= workers else 0
        self.edges = np.arange(workers + 1) * self.blocks // workers
        self.histogram = np.zeros(self.blocks)
        self.steps = 0

    @property
    def starts(self) -> Ints:
        """Boundaries in elements. The remainder that fills no block belongs to the last partition."""
        starts = self.edges * self.block
        starts[-1] = self.length
        return starts

    def tally(self, positions: Tensor) -> Tensor:
        """How many of these lie in each block, where they are; nothing if that does not move boundaries."""
        if self.rebalance != "prefix":
            return positions[:0]
        blocks = (positions // self.block).clamp(max=self.blocks - 1)
        return blocks.new_zeros(self.blocks).index_add_(0, blocks, blocks.new_ones(len(blocks)))

    def learn(self, counts: Ints, tally: Ints) -> None:
        """Take in how many entries each partition gave and each block, and move the boundaries for the next step."""
        self.steps += 1
        step: dict[str, Callable[[], None]] = {
            "none": lambda: None,
            "neighbour": lambda: self._to_neighbours(counts),
            "prefix": lambda: self._by_prefix(tally),
        }
        step[self.rebalance]()

    def _to_neighbours(self, counts: Ints) -> None:
        """One sweep: a block moves from a partition above the mean to a neighbour below it."""
        total = int(counts.sum())
        if not total:
            return
        load = counts.astype(float)
        mean, per_block = total / self.workers, total * self.block / self.length
        for left in range(self.workers - 1):
            right = left + 1
            if load[left] > TOLERANCE * mean and load[right] * TOLERANCE < mean:
                giver, taker, shift = left, right, -1
            elif load[left] * TOLERANCE < mean and load[right] > TOLERANCE * mean:
                giver, taker, shift = right, left, 1
            else:
                continue
            if self.edges[giver + 1] - self.edges[giver] - 1 < self.least:
                continue
            self.edges[right] += shift
            load[giver] -= per_block
            load[taker] += per_block

    def _by_prefix(self, tally: Ints) -> None:
        self.histogram = MEMORY * self.histogram + tally
        if self.steps % EVERY or self.blocks < self.workers:
            return
        summed = np.cumsum(self.histogram)
        shares = summed[-1] * np.arange(1, self.workers) / self.workers
        inner = np.searchsorted(summed, shares) + 1
        lowest = np.arange(1, self.workers)
        inner = np.maximum.accumulate(inner - lowest) + lowest  # at least a block each
        inner = np.minimum(inner, self.blocks - lowest[::-1])
        self.edges = np.concatenate(([0], inner, [self.blocks])).astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"edges": self.edges.tolist(), "histogram": self.histogram.tolist(), "steps": self.steps}

    def load_state_dict(self, saved: Snapshot) -> None:
        edges = saved.boundaries("edges", count=self.workers, last=self.blocks)
        most = 1 + self.length * self.workers / (1 - MEMORY)  # that each step's counts can have come to
        histogram, steps = saved.numbers("histogram", count=self.blocks, most=most), saved.count("steps")
        self.edges, self.histogram, self.steps = edges, histogram, steps
