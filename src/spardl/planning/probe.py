"""What groups cost on the ranks and links at hand: the method itself is timed at a few sizes before planning.

Collective: every rank measures at the same time, and all of them get the same numbers. Where ranks share cores, an
exchange takes longer while backward works, because it waits for its turn at every message; so there it is timed again,
with work on the side.
"""

import contextlib
import math
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from spardl.agreement import gather_values
from spardl.config import SyncConfig
from spardl.machine import cores_per_rank
from spardl.memory.velocity import Momentum
from spardl.planning.cost import Cost, CostModel, DensityCost, Measured
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session
from spardl.transport.base import Transport

Device = torch.device | str
Timing = tuple[int, float, float]  # elements, seconds selecting, seconds exchanging

SIZES = 6
SMALLEST_GROUP, LARGEST_GROUP = 256, 1 << 22  # elements; a plan goes on in proportion beyond
LARGEST_DENSE_GROUP = 1 << 17  # the links for which sparse methods are made take long over more
REPEATS = 4
MIN_CORES_PER_RANK = 2  # cores for each rank, one of which backward leaves to the communication thread
MATRIX_SIDE = 192  # of the matrices that stand for backward: some tenths of a millisecond each
LAGS_DENSITIES = 3  # densities at which LAGS has its exchange timed, the ends included


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
    config: SyncConfig, transport: Transport, elements: int, *, momentum: bool = False, device: Device = "cpu"
) -> Costs:
    """Time groups of up to `elements`, sparse and dense. Collective, between steps."""
    density = config.schedule.final
    densities = _densities(config, density)
    sparse = replace(config, dense_below=0, merge=None, density_range=None, diagnose_every=0, clip_norm=None)
    dense = sparse.with_method("dense")
    clock = _Clock(transport, momentum, torch.device(device))
    crowded = cores_per_rank(transport.gather_texts) < MIN_CORES_PER_RANK

    def timings() -> tuple[dict[float, list[Timing]], list[Timing]]:
        by_density = {each: clock.time(replace(sparse, density=each), elements) for each in densities}
        return by_density, clock.time(dense, min(elements, LARGEST_DENSE_GROUP))

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
        # Not random: that would change what training draws next.
        left, right, product = torch.ones(3, MATRIX_SIDE, MATRIX_SIDE)
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
    spread = [floor * (ceiling / floor) ** (step / (LAGS_DENSITIES - 1)) for step in range(LAGS_DENSITIES)]
    return sorted({density, *spread})


def _sizes(elements: int) -> list[int]:
    """From small groups to the whole model, in equal ratios."""
    largest = max(SMALLEST_GROUP, min(elements, LARGEST_GROUP))
    sizes = [round(SMALLEST_GROUP * (largest / SMALLEST_GROUP) ** (step / (SIZES - 1))) for step in range(SIZES)]
    return sorted(set(sizes))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times a synchronizer of its own, so that nothing of the model's is touched."""

    transport: Transport
    momentum: bool
    device: torch.device

    def time(self, config: SyncConfig, elements: int) -> list[Timing]:
        """Seconds of groups of up to `elements`, by size: medians over repetitions, means over ranks. Collective."""
        mine = [[size, *self._medians(config, size)] for size in _sizes(elements)]
        everyone = gather_values(self.transport.gather_texts, mine)
        return [
            (rows[0][0], *(math.fsum(column) / len(rows) for column in zip(*(row[1:] for row in rows), strict=True)))
            for rows in zip(*everyone, strict=True)
        ]

    def _medians(self, config: SyncConfig, size: int) -> tuple[float, float]:
        plan = plan_group(config, [Member("probe", size)], self.transport.workers)
        session = Session(self.transport, config, [plan], momentum=self.momentum)
        generator = torch.Generator().manual_seed(self.transport.rank)
        weights = torch.zeros(size, device=self.device)
        momentum = Momentum(weights, momentum=0.9, decay=0.0) if self.momentum else None
        spent: list[tuple[float, float]] = []  # so far, selecting and moving
        for _ in range(2 + REPEATS):
            total = session.stats().total
            selecting = total.seconds_selecting + total.seconds_packing
            spent.append((selecting, total.seconds_waiting + total.seconds_transferring))
            session.submit("probe", torch.randn(size, generator=generator).to(self.device), momentum=momentum)
            session.close().result()
        session.end(keep_transport=True)
        # The first one warms up.
        selecting, moving = (np.diff(column)[1:].tolist() for column in zip(*spent, strict=True))
        return statistics.median(selecting), max(0.0, statistics.median(moving))
