"""Timing of synchronisation alone: several methods side by side in one run, so that noise hits all of them alike."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spardl.allreduce import all_reduce, forget, stats_of
from spardl.config import SyncConfig


@dataclass(frozen=True)
class BenchReport:
    """One method. Times are of the slowest rank, bytes and rounds of the rank that has most, both per step."""

    method: str
    workers: int
    teams: int
    elements: int
    density: float
    achieved_density: float
    repetitions: int
    median_s: float
    quartiles_s: tuple[float, float]
    rounds: int
    bytes_sent: int
    bits_per_entry: float
    seconds_selecting: float
    seconds_waiting: float
    seconds_transferring: float
    speedup_vs_dense: float | None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Contestant(Protocol):
    """A method at work on one vector."""

    config: SyncConfig

    def reduce(self, gradient: Tensor) -> None:
        """Average `gradient` over all ranks, in place."""

    def costs(self) -> "Costs":
        """What a step has cost on this rank, on average."""

    def close(self) -> None:
        """Let go of the process group."""


@dataclass(frozen=True)
class Costs:
    rounds: float
    bytes_sent: float
    bits_per_entry: float
    density: float
    dense: bool
    selecting: float = 0.0
    waiting: float = 0.0
    transferring: float = 0.0


class TorchDense:
    """torch's own all-reduce: what everybody has without us. Its costs are those of the ring that gloo runs."""

    def __init__(self, config: SyncConfig, elements: int) -> None:
        self.config = config
        self._elements = elements

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()

    def costs(self) -> Costs:
        workers = dist.get_world_size()
        moved = 2 * self._elements * (workers - 1) / workers
        return Costs(2 * (workers - 1), 4 * moved, 32.0 if moved else 0.0, density=1.0, dense=True)

    def close(self) -> None:
        pass


class Sparse:
    """A method of ours, with its residual from step to step."""

    def __init__(self, config: SyncConfig) -> None:
        # A small vector is still synchronised by the method that was asked for.
        self.config = dataclasses.replace(config, dense_below=0)
        self._name = f"bench/{config.method}"

    def reduce(self, gradient: Tensor) -> None:
        all_reduce(gradient, name=self._name, config=self.config)

    def costs(self) -> Costs:
        stats = stats_of(self._name)
        return Costs(
            rounds=stats.rounds / stats.steps,
            bytes_sent=stats.bytes_sent / stats.steps,
            bits_per_entry=stats.bits_per_entry,
            density=stats.density,
            dense=stats.dense,
            selecting=stats.seconds_selecting / stats.steps,
            waiting=stats.seconds_waiting / stats.steps,
            transferring=stats.seconds_transferring / stats.steps,
        )

    def close(self) -> None:
        forget(self._name)


def bench(
    configs: Sequence[SyncConfig], *, elements: int, repetitions: int, warmup: int = 2, seed: int = 0
) -> list[BenchReport]:
    """Time each configuration `repetitions` times, taking turns. Every rank calls it and gets the same report."""
    contestants = [TorchDense(c, elements) if c.method == "dense" else Sparse(c) for c in configs]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + dist.get_rank())
    gradient = torch.empty(elements)
    times = torch.zeros(len(contestants), repetitions, dtype=torch.float64)
    for repetition in range(-warmup, repetitions):
        for position, contestant in enumerate(contestants):
            gradient.normal_(generator=generator)
            elapsed = _time(contestant, gradient)
            if repetition >= 0:
                times[position, repetition] = elapsed
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    medians = {c.config.method: statistics.median(row) for c, row in zip(contestants, times.tolist(), strict=True)}
    reports = [
        _report(contestant, row, elements, medians.get("dense"))
        for contestant, row in zip(contestants, times.tolist(), strict=True)
    ]
    for contestant in contestants:
        contestant.close()
    return reports


def _time(contestant: Contestant, gradient: Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    contestant.reduce(gradient)
    return time.perf_counter() - started


def _report(contestant: Contestant, times: list[float], elements: int, dense_median: float | None) -> BenchReport:
    config, workers = contestant.config, dist.get_world_size()
    costs = contestant.costs()
    median = statistics.median(times)
    return BenchReport(
        method=config.method,
        workers=workers,
        teams=config.resolved_teams(workers) if config.method == "spardl" else 1,
        elements=elements,
        density=1.0 if costs.dense else config.density_at(len(times)),
        achieved_density=costs.density,
        repetitions=len(times),
        median_s=median,
        quartiles_s=_quartiles(times),
        rounds=_most(costs.rounds),
        bytes_sent=_most(costs.bytes_sent),
        bits_per_entry=costs.bits_per_entry,
        seconds_selecting=costs.selecting,
        seconds_waiting=costs.waiting,
        seconds_transferring=costs.transferring,
        speedup_vs_dense=dense_median / median if dense_median is not None else None,
    )


def _quartiles(times: list[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _most(count: float) -> int:
    """The largest over all ranks."""
    largest = torch.tensor(count, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return round(largest.item())
