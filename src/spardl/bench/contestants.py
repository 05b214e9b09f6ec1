"""Ways to average a gradient that are timed side by side: methods of ours, and what a user would pick instead.

torch's hooks are torch's own code. They are given the whole gradient as one DDP bucket, with which they need the
fewest rounds. Where latency is emulated, every one of them waits for it in each step of the rings that it runs.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from spardl.bench.limits import sparse_bytes
from spardl.bench.vectors import Shape, Vector
from spardl.config import SyncConfig
from spardl.kernels.cpu.crew import Crew
from spardl.memory.layout import entries
from spardl.metrics import GroupStats
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session
from spardl.transport.base import Transport
from spardl.transport.ring import ring_share, ring_steps

NAME = "bench"  # of the vector

Passes = tuple[str, ...]
ONE_PASS: Passes = ("add",)  # to add up
TWO_PASSES: Passes = ("add", "read")  # and to select


@dataclass(frozen=True)
class StepCosts:
    """What a step has cost on this rank, on average. `phases`: seconds by what they were spent on, where that is known.

    `density` is that of the result.
    """

    rounds: float
    bytes_sent: float
    bits_per_entry: float
    density: float
    phases: dict[str, float] = field(default_factory=dict)


class Contestant(Protocol):
    """A way to average, at work on one vector.

    density   asked of it; 1 where it sends everything
    values    format of values on the wire
    payload   bytes that one vector takes at least, in this form
    passes    over memory that it cannot do without
    settles   steps after which it is as it will be in training, when residuals have built up
    """

    method: str
    density: float
    values: str
    payload: float
    passes: Passes
    settles: int

    def reduce(self, gradient: Tensor) -> None:
        """Average `gradient` over all ranks, in place."""

    def start_counting(self) -> None:
        """Begin the account that `costs` reports: steps from here on count."""

    def costs(self) -> StepCosts: ...


class Ours:
    """A method of this package, with its residual from step to step."""

    settles = 6

    def __init__(self, config: SyncConfig, vector: Vector, transport: Transport, steps: int, crew: Crew) -> None:
        # A small vector is still synchronised by the method that was asked for.
        plan = plan_group(
            dataclasses.replace(config, dense_below=0), [Member(NAME, vector.elements)], transport.workers
        )
        self._session = Session(transport, config, [plan], commit="group", crew=crew)
        self._before = GroupStats("before", 0)
        self.method = config.method
        self.density = 1.0 if plan.is_dense else config.density_at(steps)
        self.values: str = "fp32" if plan.is_dense else config.values
        self.teams = config.teams_of(transport.workers)
        count = entries(self.density, vector.elements)
        self.payload = sparse_bytes(count, vector.elements, self.values)
        self.passes: Passes = ONE_PASS if plan.is_dense else TWO_PASSES

    def reduce(self, gradient: Tensor) -> None:
        self._session.reduce(NAME, gradient)

    @property
    def _stats(self) -> GroupStats:
        (stats,) = self._session.stats().groups
        return stats

    def start_counting(self) -> None:
        self._before = dataclasses.replace(self._stats)

    def costs(self) -> StepCosts:
        after, before = self._stats, self._before
        steps = after.steps - before.steps
        phases = {
            each.name.removeprefix("seconds_"): (getattr(after, each.name) - getattr(before, each.name)) / steps
            for each in dataclasses.fields(GroupStats)
            if each.name.startswith("seconds_")
        }
        sent, bytes_sent = after.entries_sent - before.entries_sent, after.bytes_sent - before.bytes_sent
        return StepCosts(
            rounds=(after.rounds - before.rounds) / steps,
            bytes_sent=bytes_sent / steps,
            bits_per_entry=8 * bytes_sent / sent if sent else 0.0,
            density=(after.entries - before.entries) / (after.elements * steps),
            phases=phases,
        )


class Torch:
    """What all that runs on torch's collectives has in common: they are rings, and each of their steps may be late."""

    method = "dense"
    density = 1.0
    values = "fp32"
    passes = ONE_PASS
    settles = 0
    collectives = 1  # all-reduces, one after the other

    def __init__(self, vector: Vector, latency: float) -> None:
        self.elements = vector.elements
        self.workers = dist.get_world_size()
        self.payload = 4.0 * vector.elements
        self._latency = latency

    @property
    def rounds(self) -> int:
        return self.collectives * ring_steps(self.workers)

    def reduce(self, gradient: Tensor) -> None:
        self.average(gradient)
        time.sleep(self.rounds * self._latency)

    def average(self, gradient: Tensor) -> None:
        """torch's own all-reduce: what everybody has without us."""
        dist.all_reduce(gradient)
        gradient /= self.workers

    def start_counting(self) -> None:
        pass

    def costs(self) -> StepCosts:
        return StepCosts(self.rounds, self.payload * ring_share(self.workers), 8 * self.payload / self.elements, 1.0)


class Fp16(Torch):
    """torch's fp16_compress_hook: everything, in half the bytes."""

    method = "fp16"
    values = "fp16"

    def __init__(self, vector: Vector, latency: float) -> None:
        super().__init__(vector, latency)
        self.payload = 2.0 * vector.elements
        self._bucket = WholeGradient(vector.shapes)

    def average(self, gradient: Tensor) -> None:
        fp16_compress_hook(_world(), self._bucket.holding(gradient)).wait()


class PowerSGD(Torch):
    """torch's powerSGD_hook: each matrix as a product of two thin ones, with error feedback and warm start.

    Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization", NeurIPS 2019. The
    dense steps that training begins with are left out. Three all-reduces: what is no matrix, left factors, right ones.
    """

    passes = TWO_PASSES
    collectives = 3

    def __init__(self, vector: Vector, latency: float, rank: int) -> None:
        super().__init__(vector, latency)
        self.method = f"powersgd-{rank}"
        self._state = PowerSGDState(_world(), matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self._state.iter = self._state.start_powerSGD_iter
        self._bucket = WholeGradient(vector.shapes)
        self.payload = 4.0 * sum(factor_elements(shape, rank) for shape in vector.shapes)

    def average(self, gradient: Tensor) -> None:
        averaged = powerSGD_hook(self._state, self._bucket.holding(gradient)).wait()
        if averaged.data_ptr() != gradient.data_ptr():
            gradient.copy_(averaged)


class HandwrittenTopk(Torch):
    """Top-k as people write it: torch.topk of gradient plus residual, all_gather of both, and a sum of what came."""

    method = "handwritten-topk"
    passes = TWO_PASSES
    collectives = 1  # two all-gathers of P-1 steps each

    def __init__(self, vector: Vector, latency: float, density: float) -> None:
        super().__init__(vector, latency)
        self.density = density
        self.residual = torch.zeros(vector.elements)
        self._count = entries(density, vector.elements)
        self._chosen: list[Tensor] = []
        self.payload = sparse_bytes(self._count, vector.elements, "fp32")

    def average(self, gradient: Tensor) -> None:
        self.residual += gradient
        _, indices = torch.topk(self.residual.abs(), self._count)
        values = self.residual[indices]
        self.residual[indices] = 0
        all_values = [torch.empty_like(values) for _ in range(self.workers)]
        all_indices = [torch.empty_like(indices) for _ in range(self.workers)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_indices, indices)
        gradient.zero_()
        gradient.scatter_add_(0, torch.cat(all_indices), torch.cat(all_values))
        gradient /= self.workers
        self._chosen = all_indices

    def costs(self) -> StepCosts:
        each = 4 + 8
        chosen = torch.cat(self._chosen).unique().numel() / self.elements
        return StepCosts(self.rounds, (self.workers - 1) * self._count * each, 8 * each, chosen)


class WholeGradient:
    """What torch's hooks ask of a DDP bucket, for one that holds the whole gradient."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._sizes = [torch.Size(shape).numel() for shape in shapes]
        self._buffer = torch.empty(0)

    def holding(self, gradient: Tensor) -> Any:
        self._buffer = gradient
        return self

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        pieces = zip(self._buffer.split(self._sizes), self._shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def factor_elements(shape: Shape, rank: int) -> int:
    """What PowerSGD sends of one tensor: two factors where that halves it or better, else all of it."""
    elements = torch.Size(shape).numel()
    rows, columns = shape[0], elements // shape[0]
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if 2 * factors < elements else elements


# By name, what makes it for a vector, an emulated latency and a density. A rival without a density ignores it.
RIVAL_MAKERS: dict[str, Callable[[Vector, float, float], Contestant]] = {
    "fp16": lambda vector, latency, density: Fp16(vector, latency),
    "powersgd-1": lambda vector, latency, density: PowerSGD(vector, latency, rank=1),
    "powersgd-4": lambda vector, latency, density: PowerSGD(vector, latency, rank=4),
    "handwritten-topk": lambda vector, latency, density: HandwrittenTopk(vector, latency, density),
}


def _world() -> Any:
    return dist.group.WORLD
