"""Timing of synchronisation alone: everybody side by side in one run, so that noise hits all of them alike."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spardl.agreement import check_agreement
from spardl.bench.contestants import RIVAL_MAKERS, Contestant, Ours, Torch
from spardl.bench.limits import Limit, limit
from spardl.bench.match import SPARSE_RIVALS, Match
from spardl.bench.vectors import Vector
from spardl.kernels.cpu.crew import Crew
from spardl.machine import cores_per_rank
from spardl.transport.base import Transport
from spardl.transport.choice import transport_named
from spardl.transport.delayed import DelayedTransport

POOL = 1 << 24  # random numbers that gradients are made of
MEASURED = 1 << 24  # elements over which passes over memory are timed; beyond that they grow in proportion

Listener = Callable[[int, int], None]


@dataclass(frozen=True)
class BenchReport:
    """One way to average one vector. Times are of the slowest rank, bytes and rounds of the rank that has most.

    `phases` are seconds of a step by what they were spent on, as the mean over ranks; `limit` is what no way that
    sends this much can beat, and `rate` the bytes per second that it was computed with, None where there is no limit.
    """

    method: str
    model: str
    workers: int
    teams: int
    elements: int
    density: float
    achieved_density: float
    values: str
    latency_s: float
    rate: float | None
    repetitions: int
    median_s: float
    quartiles_s: tuple[float, float]
    rounds: int
    bytes_sent: int
    bits_per_entry: float
    phases: dict[str, float]
    limit: Limit
    speedup_vs_dense: float | None

    @property
    def times_limit(self) -> float:
        """How many times as long as the limit it took."""
        return self.median_s / self.limit.total if self.limit.total else math.inf

    def to_dict(self) -> dict[str, Any]:
        record = {**dataclasses.asdict(self), "limit_s": self.limit.total, "times_limit": self.times_limit}
        record |= {f"limit_{part}_s": seconds for part, seconds in record.pop("limit").items()}
        return record | {f"seconds_{phase}": seconds for phase, seconds in record.pop("phases").items()}


class Gradients:
    """Random gradients, anew for every turn, for little: stretches of a pool of normal numbers, from another place."""

    def __init__(self, elements: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + dist.get_rank())
        self._pool = torch.randn(min(elements, POOL), generator=self._generator)
        self.gradient = torch.empty(elements)

    def next(self) -> Tensor:
        at, size = 0, self._pool.numel()
        while at < self.gradient.numel():
            first = int(torch.randint(size, (), generator=self._generator))
            stretch = self._pool[first : first + self.gradient.numel() - at]
            # A factor of its own for each stretch, lest one value stand at many places.
            factor = 1 + 0.1 * float(torch.rand((), generator=self._generator))
            torch.mul(stretch, factor, out=self.gradient[at : at + stretch.numel()])
            at += stretch.numel()
        return self.gradient


class MemoryPasses:
    """What one pass over the vector takes here, while all ranks do the same: an addition in place, and a read."""

    def __init__(self, elements: int) -> None:
        self._scale = elements / min(elements, MEASURED)
        self._sum = np.zeros(min(elements, MEASURED), np.float32)
        self._ways: dict[str, Callable[[Tensor], object]] = {"add": self._add, "read": self._read}
        self._seconds: dict[str, list[float]] = {name: [] for name in self._ways}

    def turn(self, gradient: Tensor) -> None:
        for name, way in self._ways.items():
            self._seconds[name].append(self._scale * _time(way, gradient))

    def medians(self) -> dict[str, float]:
        """Median seconds of each way, by name, of the slowest rank. Collective."""
        times = torch.tensor(list(self._seconds.values()), dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return {name: statistics.median(row) for name, row in zip(self._ways, times.tolist(), strict=True)}

    def _add(self, gradient: Tensor) -> object:
        return np.add(self._sum, gradient.numpy()[: self._sum.size], out=self._sum)

    def _read(self, gradient: Tensor) -> object:
        return self._sum.max()


class Bench:
    """One rank's part in a match. Every rank makes one and calls `measure` for the same vectors."""

    def __init__(self, match: Match) -> None:
        self._match = match
        first = match.configs[0]
        inner = transport_named(first.transport, None, timeout=first.timeout, device="cpu", encrypt=first.encrypt)
        self._gather_texts = inner.gather_texts
        self._crew = Crew.for_cores(cores_per_rank(inner.gather_texts))
        self._transport: Transport = DelayedTransport(inner, match.latency) if match.latency else inner

    def measure(self, vector: Vector, listener: Listener | None = None) -> list[BenchReport]:
        """Time everybody on this vector; every rank gets the same reports. `listener` hears of each turn."""
        match = self._match
        facts = {**match.facts(), "model": vector.model, "elements": vector.elements}
        check_agreement(facts, self._gather_texts, "this benchmark")
        contestants = self._contestants(vector)
        gradients, passes = Gradients(vector.elements, match.seed), MemoryPasses(vector.elements)
        times = torch.zeros(len(contestants), match.repetitions, dtype=torch.float64)
        for contestant in contestants:
            for _ in range(contestant.settles):
                contestant.reduce(gradients.next())
        for turn in range(-match.warmup, match.repetitions):
            if turn == 0:
                for contestant in contestants:
                    contestant.start_counting()
            for position, contestant in enumerate(contestants):
                elapsed = _time(contestant.reduce, gradients.next())
                if turn >= 0:
                    times[position, turn] = elapsed
            passes.turn(gradients.gradient)
            if listener is not None:
                listener(turn + match.warmup + 1, match.warmup + match.repetitions)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return self._reports(vector, contestants, times.tolist(), passes.medians())

    def _contestants(self, vector: Vector) -> list[Contestant]:
        match = self._match
        steps = match.warmup + match.repetitions
        found: list[Contestant] = [
            Torch(vector, match.latency)
            if config.method == "dense"
            else Ours(config, vector, self._transport, steps, self._crew)
            for config in match.configs
        ]
        for name in match.rivals:
            densities = match.densities if name in SPARSE_RIVALS else (1.0,)
            found += [RIVAL_MAKERS[name](vector, match.latency, density) for density in densities]
        return found

    def _reports(
        self,
        vector: Vector,
        contestants: Sequence[Contestant],
        times: list[list[float]],
        passes: dict[str, float],
    ) -> list[BenchReport]:
        rows = list(zip(contestants, times, strict=True))
        dense = next((statistics.median(row) for contestant, row in rows if contestant.method == "dense"), None)
        return [self._report(vector, contestant, row, passes, dense) for contestant, row in rows]

    def _report(
        self,
        vector: Vector,
        contestant: Contestant,
        times: list[float],
        passes: dict[str, float],
        dense: float | None,
    ) -> BenchReport:
        match, workers = self._match, dist.get_world_size()
        costs = contestant.costs()
        median = statistics.median(times)
        return BenchReport(
            method=contestant.method,
            model=vector.model,
            workers=workers,
            teams=getattr(contestant, "teams", 1),
            elements=vector.elements,
            density=contestant.density,
            achieved_density=costs.density,
            values=contestant.values,
            latency_s=match.latency,
            rate=match.rate if math.isfinite(match.rate) else None,
            repetitions=len(times),
            median_s=median,
            quartiles_s=quartiles(times),
            rounds=_most(costs.rounds),
            bytes_sent=_most(costs.bytes_sent),
            bits_per_entry=costs.bits_per_entry,
            phases=_means(costs.phases),
            limit=limit(
                payload=contestant.payload,
                workers=workers,
                rate=match.rate,
                latency=match.latency,
                memory=sum(passes[name] for name in contestant.passes),
            ),
            speedup_vs_dense=dense / median if dense is not None else None,
        )


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _time(way: Callable[[Tensor], object], gradient: Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    way(gradient)
    return time.perf_counter() - started


def _most(count: float) -> int:
    """The largest of all ranks' counts. Collective."""
    largest = torch.tensor(count, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return round(largest.item())


def _means(figures: dict[str, float]) -> dict[str, float]:
    """The mean of each figure over all ranks. Collective."""
    if not figures:
        return {}
    total = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(figures, (total / dist.get_world_size()).tolist(), strict=True))
