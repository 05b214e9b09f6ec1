"""What groups cost on the ranks and links at hand: the method itself is timed at a few sizes before planning.

Collective: every rank measures at the same time, and all of them get the same numbers. Where ranks share cores, an
exchange takes longer while backward works, because it waits for its turn at every message; so there it is timed again,
with work on the side.
"""

import contextlib
import json
import math
import statistics
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from spardl.accumulator import Momentum
from spardl.config import SyncConfig
from spardl.kernels.crew import cores_each
from spardl.metrics import GroupStats
from spardl.planning.cost import Cost, CostModel, DensityCost, Measured
from spardl.sync import Member, Part, Synchronizer
from spardl.transport.base import Transport

Device = torch.device | str
Timing = tuple[int, float, float]  # elements, seconds selecting, seconds exchanging

SIZES = 6
SMALLEST, LARGEST = 256, 1 << 22  # elements; a plan goes on in proportion beyond
LARGEST_DENSE = 1 << 17  # the links for which sparse methods are made take long over more
REPEATS = 4
ROOMY = 2  # cores for each rank, one of which backward leaves to the communication thread
SIDE = 192  # of the matrices that stand for backward: some tenths of a millisecond each
BETWEEN = 3  # densities at which LAGS has its exchange timed, the ends included


class Gathering(Transport, Protocol):
    """A transport on which ranks can also compare notes."""

    def gather_texts(self, text: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds over elements: of a sparse group its selection and, by density, its exchange; of a dense one what this
    rank does itself, and the exchange.

    crowded  whether backward and selection share a core, so that it stands still meanwhile
    """

    selection: Measured
    exchanges: tuple[tuple[float, Measured], ...]
    dense_work: Measured
    dense: Measured
    density: float
    dense_below: int
    crowded: bool = False

    def model(self, density: float | None = None) -> CostModel:
        """For planners: groups below `dense_below` go dense. With a core to spare, selection shares its thread with the
        exchange and leaves backward alone."""
        at = self.density if density is None else density
        return CostModel(
            selection=lambda elements: (self.dense_work if elements < self.dense_below else self.selection)(elements),
            exchange=lambda elements: self.exchange(elements, at),
            selection_blocks=self.crowded,
        )

    def exchange(self, elements: int, density: float) -> float:
        """Seconds to exchange a group at this density."""
        if elements < self.dense_below or density >= 1.0:
            return self.dense(elements)
        grid = [known for known, _ in self.exchanges]
        return float(np.interp(density, grid, [line(elements) for _, line in self.exchanges]))

    def for_lags(self) -> tuple[DensityCost, Cost]:
        return self.exchange, self.dense


def measure(
    config: SyncConfig, transport: Gathering, elements: int, *, momentum: bool = False, device: Device = "cpu"
) -> Costs:
    """Time groups of up to `elements`, sparse and dense. Collective, between steps."""
    density = config.density_at(sys.maxsize)
    densities = _densities(config, density)
    sparse = replace(config, dense_below=0, merge=None, density_range=None, delta_every=0)
    dense = replace(sparse, method="dense", density=1.0)
    clock = _Clock(transport, momentum, torch.device(device))
    crowded = min(cores_each(transport.gather_texts)) < ROOMY

    def timings() -> tuple[dict[float, list[Timing]], list[Timing]]:
        by_density = {each: clock.time(replace(sparse, density=each), elements) for each in densities}
        return by_density, clock.time(dense, min(elements, LARGEST_DENSE))

    alone = beside = timings()
    if crowded:
        with _work_on_the_side():
            beside = timings()
    exchanges = {each: Measured.of([(size, moved) for size, _, moved in beside[0][each]]) for each in densities}
    return Costs(
        selection=Measured.of([(size, selecting) for size, selecting, _ in alone[0][density]]),
        exchanges=tuple(exchanges.items()),
        dense_work=Measured.of([(size, working) for size, working, _ in alone[1]]),
        dense=Measured.of([(size, moved) for size, _, moved in beside[1]]),
        density=density,
        dense_below=config.dense_below,
        crowded=crowded,
    )


@contextlib.contextmanager
def _work_on_the_side() -> Iterator[None]:
    """A thread that computes as backward does: without Python's lock, but for a moment now and then."""
    over = threading.Event()

    def work() -> None:
        left, right, product = torch.ones(3, SIDE, SIDE)  # not random: that would change what training draws next
        while not over.is_set():
            torch.mm(left, right, out=product)

    worker = threading.Thread(target=work, name="spardl-probe", daemon=True)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()


def _densities(config: SyncConfig, density: float) -> list[float]:
    """The configured one, and where densities may vary, some of that range."""
    if config.density_range is None:
        return [density]
    floor, ceiling = config.density_range
    spread = [floor * (ceiling / floor) ** (step / (BETWEEN - 1)) for step in range(BETWEEN)]
    return sorted({density, *spread})


def _sizes(elements: int) -> list[int]:
    """From small groups to the whole model, in equal ratios."""
    largest = max(SMALLEST, min(elements, LARGEST))
    sizes = [round(SMALLEST * (largest / SMALLEST) ** (step / (SIZES - 1))) for step in range(SIZES)]
    return sorted(set(sizes))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times a synchronizer of its own, so that nothing of the model's is touched."""

    transport: Gathering
    momentum: bool
    device: torch.device

    def time(self, config: SyncConfig, elements: int) -> list[Timing]:
        """Medians over repetitions, means over ranks."""
        mine = [[size, *self._medians(config, size)] for size in _sizes(elements)]
        everyone = [json.loads(text) for text in self.transport.gather_texts(json.dumps(mine))]
        return [
            (rows[0][0], *(math.fsum(column) / len(rows) for column in zip(*(row[1:] for row in rows), strict=True)))
            for rows in zip(*everyone, strict=True)
        ]

    def _medians(self, config: SyncConfig, size: int) -> tuple[float, float]:
        sync = Synchronizer(config, self.transport, momentum=self.momentum, device=self.device)
        sync.regroup([[Member("probe", size)]])
        (group,) = sync.groups
        generator = torch.Generator().manual_seed(self.transport.rank)
        weights = torch.zeros(size, device=self.device)
        momentum = Momentum(weights, momentum=0.9, decay=0.0, damping=1.0, nesterov=False) if self.momentum else None
        selecting, moving = [], []
        for _ in range(1 + REPEATS):
            gradient = torch.randn(size, generator=generator).to(self.device)
            group.stats = GroupStats(group.stats.name, size, dense=group.stats.dense)
            sync.begin()
            sync.synchronize(group, [Part("probe", gradient, momentum)])
            sync.finish()
            selecting.append(group.stats.seconds_selecting + group.stats.seconds_packing)
            moving.append(group.stats.seconds_waiting + group.stats.seconds_transferring)
        # The first one warms up.
        return statistics.median(selecting[1:]), max(0.0, statistics.median(moving[1:]))
