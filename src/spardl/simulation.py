"""Any method on any number of simulated workers: the real programs, real memory and real frames, in one process."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spardl.accumulator import Accumulator
from spardl.collectives.memory import Memory
from spardl.collectives.method import Place, method_class
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.sparse import SparseBlocks
from spardl.transport.simulated import SimulatedNetwork
from spardl.wire.frame import Codec


class SimulatedCluster:
    """Workers that synchronise one vector of `elements` each, step after step."""

    def __init__(
        self, workers: int, elements: int, config: SyncConfig, *, latency: float = 0.0, bandwidth: float = math.inf
    ) -> None:
        if workers < 1 or elements < 1:
            raise ConfigError(f"{workers} workers with {elements} elements leave nothing to simulate; give 1 or more.")
        make = method_class(config.method)
        self.config = config
        self.elements = elements
        self.network = SimulatedNetwork(workers, latency=latency, bandwidth=bandwidth)
        self.methods = [make(Place(rank, workers, elements, config)) for rank in range(workers)]
        codec = Codec(config.values, config.indices)
        self.memories = [
            Memory(Accumulator(method.layout, residuals=config.residuals), codec) for method in self.methods
        ]
        self.results: list[SparseBlocks | None] = []
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        """Synchronise; returns the dense sum that each rank holds. `gradients` are left as they were."""
        density = self.config.density_at(self.steps)
        self.steps += 1
        for method, memory, gradient in zip(self.methods, self.memories, gradients, strict=True):
            add = memory.acc.add_later if method.about.by_blocks else memory.acc.add
            add(0, gradient.clone())
        work = zip(self.methods, self.memories, strict=True)
        self.results = self.network.run([method.synchronize(memory, density) for method, memory in work])
        return [self._close(memory.acc, result) for memory, result in zip(self.memories, self.results, strict=True)]

    def residuals(self) -> list[Tensor]:
        """Each rank's residual, in natural order."""
        return [self._read(memory.acc) for memory in self.memories]

    def _close(self, acc: Accumulator, result: SparseBlocks | None) -> Tensor:
        total = torch.zeros(self.elements)
        if result is None:
            acc.read(0, total)
            acc.commit(dense=True)
        else:
            acc.settle(result)
            acc.commit()
            positions, values = acc.natural(result)
            total[torch.as_tensor(positions)] = torch.as_tensor(values)
        return total

    def _read(self, acc: Accumulator) -> Tensor:
        out = torch.empty(self.elements)
        acc.read(0, out)
        return out


@dataclass(frozen=True)
class SimulationReport:
    """One simulated run. Figures are per step, for the rank that has most; `conserved` covers every rank's residual."""

    method: str
    workers: int
    teams: int
    elements: int
    density: float
    steps: int
    latency_s: float
    bandwidth_bytes_per_s: float
    time_s: float
    rounds: int
    messages_max: int
    bytes_sent_max: int
    bits_per_entry: float
    nnz: int
    conserved: bool
    lost_share: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def simulate(
    *,
    workers: int,
    elements: int,
    config: SyncConfig,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    steps: int = 1,
    seed: int = 0,
) -> SimulationReport:
    """Synchronise heavy-tailed random gradients for `steps` steps and report what it cost.

    `conserved` says whether, over every step and coordinate, what all ranks put in equals what they got out plus what
    they kept, to float32 accuracy; `lost_share` is what was missing then, as a share of the magnitude put in.
    """
    if steps < 1:
        raise ConfigError(f"{steps} steps leave nothing to simulate; give 1 or more.")
    cluster = SimulatedCluster(workers, elements, config, latency=latency, bandwidth=bandwidth)
    generator = torch.Generator().manual_seed(seed)
    conserved, lost = True, 0.0
    for _ in range(steps):
        gradients = [torch.randn(elements, generator=generator) ** 3 for _ in range(workers)]
        kept_all, share = _balance(cluster, gradients)
        conserved &= kept_all
        lost += share / steps
    traffic = cluster.network.traffic
    entries = sum(memory.entries_sent for memory in cluster.memories)
    sent = sum(rank.bytes_sent for rank in traffic)
    result = cluster.results[0]
    return SimulationReport(
        method=config.method,
        workers=workers,
        teams=config.resolved_teams(workers) if config.method == "spardl" else 1,
        elements=elements,
        density=config.density_at(cluster.steps - 1),
        steps=steps,
        latency_s=latency,
        bandwidth_bytes_per_s=bandwidth,
        time_s=cluster.network.time / steps,
        rounds=max(rank.rounds for rank in traffic) // steps,
        messages_max=max(rank.messages for rank in traffic) // steps,
        bytes_sent_max=max(rank.bytes_sent for rank in traffic) // steps,
        bits_per_entry=8 * sent / entries if entries else 32.0 if sent else 0.0,
        nnz=elements if result is None else len(result),
        conserved=conserved,
        lost_share=0.0 if conserved else lost,
    )


def _balance(cluster: SimulatedCluster, gradients: list[Tensor]) -> tuple[bool, float]:
    """Step, and hold the sum of what went in against the sum of what came out and what stayed.

    Returns whether they are equal, on all ranks alike, and the missing share of the step's gradients.
    """
    before = _total(gradients) + _total(cluster.residuals())
    magnitude = _total([gradient.abs() for gradient in gradients]) + _total([r.abs() for r in cluster.residuals()])
    results = cluster.step(gradients)
    after = results[0].double() + _total(cluster.residuals())
    identical = all(torch.equal(results[0], other) for other in results[1:])
    missing = (before - after).abs()
    share = float(missing.sum() / _total([gradient.abs() for gradient in gradients]).sum())
    return identical and bool((missing <= 1e-5 * magnitude + 1e-30).all()), share


def _total(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return total
