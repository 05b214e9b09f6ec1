"""What a group of a given size costs: seconds to select its entries, seconds to exchange them.

Planners take any function of the number of elements. The usual one is a line, fitted to measurements of the actual
ranks and links, or to the real program on the simulated network, so every method and every worker count is covered.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spardl.config import SyncConfig
from spardl.density import check_density
from spardl.errors import ConfigError

Floats = NDArray[np.float64]
Cost = Callable[[int], float]
DensityCost = Callable[[int, float], float]

# OMGS-SGD's released constants: seconds per element and log2 of the elements (P102-100), and by worker count the
# start-up and seconds per byte of an all-gather on its 1 Gbit/s Ethernet.
PUBLISHED_SELECTION = 2.18896957e-10
PUBLISHED_GATHER = {2: (1.6e-3, 1.0e-8), 4: (2.7e-3, 1.3e-8), 8: (4.0e-3, 1.5e-8), 16: (1.1e-2, 1.7e-8)}

# In a fit, a time below this share of the longest weighs no more than one of this share.
NEGLIGIBLE = 1e-6

# The simulated network is asked at these multiples of a base size: one that gives each worker's block a few entries,
# unless all workers together would hold too many elements for an answer at once.
SIZES = (1, 2, 4)
ENTRIES_PER_BLOCK = 8
SIMULATED_ELEMENTS = 1 << 18

SETTLING = 4  # steps before a simulated exchange is timed, and as many that are


@dataclass(frozen=True, slots=True)
class Linear:
    """`startup` seconds, and `per_element` for each element. Nothing costs nothing."""

    startup: float
    per_element: float

    def __call__(self, elements: int) -> float:
        return self.startup + self.per_element * elements if elements else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds at measured sizes, straight between them and beyond the last; what is smaller costs as the smallest.

    For the real machine, where a line would miss what caches and buffers do. Never falls. Nothing costs nothing.
    """

    elements: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[tuple[int, float]]) -> "Measured":
        """The curve through (elements, seconds) at ascending sizes."""
        sizes, seconds = zip(*samples, strict=True)
        return cls(tuple(sizes), tuple(np.maximum.accumulate(seconds).tolist()))

    def __call__(self, elements: int) -> float:
        if not elements:
            return 0.0
        if elements > self.elements[-1]:
            return self.seconds[-1] * elements / self.elements[-1]
        return float(np.interp(elements, self.elements, self.seconds))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds to select and to exchange a group, by its number of elements.

    selection_blocks  whether backward stands still while a group selects (one stream of a device, as OMGS-SGD models
                      it) or the selection runs on the communication thread, before the exchange (a CPU)
    """

    selection: Cost
    exchange: Cost
    selection_blocks: bool = True

    def stall(self, elements: int) -> float:
        """How long backward stands still for a group."""
        return self.selection(elements) if self.selection_blocks else 0.0

    def occupation(self, elements: int) -> float:
        """How long a group holds the communication channel."""
        exchange = self.exchange(elements)
        return exchange if self.selection_blocks else self.selection(elements) + exchange


def fit(samples: Sequence[tuple[int, float]]) -> Linear:
    """The line through measured (elements, seconds) with the least squared relative error; neither part is negative.

    Relative, because timings scatter in proportion: otherwise the largest sizes alone would decide the start-up.
    """
    if not samples:
        raise ConfigError("a cost cannot be fitted to no measurements; give at least one (elements, seconds) pair.")
    elements, seconds = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    if not (np.isfinite(seconds).all() and (seconds >= 0).all() and (elements > 0).all()):
        raise ConfigError("a cost is fitted to sizes above 0 and finite times of 0 or more; check the measurements.")
    if not seconds.any():
        return Linear(0.0, 0.0)
    largest, longest = float(elements.max()), float(seconds.max())
    weights = 1 / np.maximum(seconds / longest, NEGLIGIBLE)
    columns = np.stack([np.ones_like(elements), elements / largest], axis=1) * weights[:, None]
    startup, slope = _non_negative(columns, seconds / longest * weights)
    return Linear(startup * longest, slope * longest / largest)


def _non_negative(columns: Floats, target: Floats) -> tuple[float, float]:
    """Least squares in two unknowns; if the free optimum has a negative part, the best one has a zero."""
    free = np.linalg.lstsq(columns, target, rcond=None)[0]
    if (free >= 0).all():
        return float(free[0]), float(free[1])
    alone = columns.T @ target / (columns**2).sum(axis=0)
    candidates = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
    best = min(candidates, key=lambda found: float(((columns @ found - target) ** 2).sum()))
    return float(best[0]), float(best[1])


def from_network(
    config: SyncConfig,
    workers: int,
    *,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    selection_rate: float = math.inf,
    selection_blocks: bool = True,
) -> CostModel:
    """Costs of the configured method on a simulated network of `latency` seconds and `bandwidth` bytes per second.

    The program itself is run at a few small sizes; `selection_rate` is in elements per second. Groups that the
    synchronizer would send dense, being smaller than `config.dense_below`, cost what dense costs.
    """
    if not selection_rate > 0:
        raise ConfigError(f"{selection_rate} elements per second select nothing; give more than 0, or inf.")
    sparse = exchange_cost(config, workers, latency=latency, bandwidth=bandwidth)
    dense = exchange_cost(config.with_method("dense"), workers, latency=latency, bandwidth=bandwidth)
    return CostModel(
        selection=Linear(0.0, 1 / selection_rate),
        exchange=lambda elements: dense(elements) if elements < config.dense_below else sparse(elements),
        selection_blocks=selection_blocks,
    )


def exchange_cost(config: SyncConfig, workers: int, *, latency: float, bandwidth: float) -> Linear:
    """What the configured method's exchange takes on the simulated network, at the density of its schedule's end."""
    density = config.schedule.final
    fixed = replace(config, density=density, dense_below=0)
    wanted, allowed = ENTRIES_PER_BLOCK * workers / density, SIMULATED_ELEMENTS / workers
    base = max(256, math.ceil(min(wanted, allowed)))
    sizes = [base * multiple for multiple in SIZES]
    return fit([(elements, _simulated_seconds(fixed, workers, elements, latency, bandwidth)) for elements in sizes])


def _simulated_seconds(config: SyncConfig, workers: int, elements: int, latency: float, bandwidth: float) -> float:
    """A step's exchange of random gradients, once the method has settled: some set themselves up, some steer."""
    import torch  # planning itself does without

    from spardl.simulator.cluster import SimulatedCluster

    cluster = SimulatedCluster(workers, elements, config, latency=latency, bandwidth=bandwidth)
    generator = torch.Generator().manual_seed(0)
    settled = 0.0
    for step in range(2 * SETTLING):
        if step == SETTLING:
            settled = cluster.network.time
        cluster.step([torch.randn(elements, generator=generator) ** 3 for _ in range(workers)])
    return (cluster.network.time - settled) / SETTLING


def exchange_at(
    config: SyncConfig, workers: int, densities: Sequence[float], *, latency: float, bandwidth: float
) -> DensityCost:
    """The exchange as a function of elements and density: a line at each of `densities`, and linear between them."""
    grid = sorted(set(densities))
    for density in grid:
        check_density(density)
    lines = [
        exchange_cost(replace(config, density=density), workers, latency=latency, bandwidth=bandwidth)
        for density in grid
    ]
    return lambda elements, density: float(np.interp(density, grid, [line(elements) for line in lines]))


def published(workers: int, *, density: float = 0.001) -> CostModel:
    """OMGS-SGD's own constants (top-k, two all-gathers of a group over 1 Gbit/s), for comparison with its results.

    Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs",
    INFOCOM 2020. Only its four worker counts were measured; anything real is fitted.
    """
    if workers not in PUBLISHED_GATHER:
        known = ", ".join(map(str, PUBLISHED_GATHER))
        raise ConfigError(f"OMGS-SGD published costs for {known} workers, not for {workers}; fit your own.")
    startup, per_byte = PUBLISHED_GATHER[workers]
    return CostModel(
        selection=lambda elements: PUBLISHED_SELECTION * elements * math.log2(elements) if elements else 0.0,
        exchange=Linear(2 * startup, 2 * per_byte * density * workers * 4),
    )
