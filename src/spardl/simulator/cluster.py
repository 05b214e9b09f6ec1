"""Any method on any number of simulated workers: the product's own step, memory and frames, in one process."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spardl import kernels
from spardl.config import SyncConfig, configure_vector
from spardl.errors import ConfigError
from spardl.memory.velocity import Momentum
from spardl.simulator.driver import Driver
from spardl.simulator.network import Network
from spardl.sync.plan import GroupPlan, Member, plan_model
from spardl.sync.step import Outcome, Part, Terms, group_step
from spardl.sync.synchronizer import Synchronizer

VECTOR = "vector"

Tensors = Mapping[str, Tensor]


class SimulatedCluster:
    """Workers that synchronise the same tensors step after step, each with a synchronizer of its own.

    Args:
        workers: how many.
        elements: of the one tensor, if `plans` names no others.
        config: the settings.
        network: what connects them; default: a switch with links of `latency` seconds and `bandwidth` bytes per second.
        plans: groups of tensors; default: what the settings make of the one tensor.
        momentum: whether steps bring rules of momentum.
    """

    def __init__(
        self,
        workers: int,
        elements: int,
        config: SyncConfig,
        *,
        network: Network | None = None,
        latency: float = 0.0,
        bandwidth: float = math.inf,
        plans: Sequence[GroupPlan] | None = None,
        momentum: bool = False,
    ) -> None:
        if workers < 1 or elements < 1:
            raise ConfigError(f"{workers} workers with {elements} elements leave nothing to simulate; give 1 or more.")
        config.check_for(workers)
        self.config = config
        self.elements = elements
        self.network = Driver(network or Network.switch(workers, latency=latency, bandwidth=bandwidth))
        arranged = plan_model(config, [Member(VECTOR, elements)], workers) if plans is None else plans
        kernel = kernels.for_device(torch.device("cpu"))
        self.ranks = [Synchronizer(rank, workers, kernels=kernel, momentum=momentum) for rank in range(workers)]
        for sync in self.ranks:
            sync.regroup(arranged)
        self.outcomes: list[Outcome] = []  # of the last group of the last step, by rank

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.ranks[0].steps

    def step(self, gradients: Sequence[Tensor], **terms: Any) -> list[Tensor]:
        """Synchronise one tensor each; returns the average that each rank holds. `gradients` are left as they were."""
        given = [{VECTOR: gradient} for gradient in gradients]
        return [averages[VECTOR] for averages in self.step_all(given, **terms)]

    def step_all(
        self,
        gradients: Sequence[Tensors],
        rules: Sequence[Mapping[str, Momentum]] | None = None,
        **terms: Any,
    ) -> list[dict[str, Tensor]]:
        """Synchronise every tensor of every rank, group after group, and commit or roll back; NaN if rolled back."""
        own = [{name: tensor.clone() for name, tensor in given.items()} for given in gradients]
        agreed = Terms(**{"step": self.steps, "lazily": True, **terms})
        for position in range(len(self.ranks[0].groups)):
            programs = []
            for rank, sync in enumerate(self.ranks):
                group = sync.groups[position]
                rule = rules[rank] if rules is not None else {}
                parts = [Part(name, own[rank][name], rule.get(name)) for name in group.offsets]
                sync.opens(group)
                programs.append(group_step(group, parts, agreed))
            self.outcomes = self.network.run(programs)
        for sync in self.ranks:
            sync.finish()
        return own

    def residuals(self) -> list[Tensor]:
        """Each rank's residual, all tensors one after the other."""
        return [torch.cat([kept.residual for kept in sync.kept().values()]) for sync in self.ranks]

    def entries_sent(self) -> list[int]:
        """Indices that have left each rank so far."""
        return [sum(group.memory.frames.account.entries for group in sync.groups) for sync in self.ranks]


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
    config: SyncConfig | None = None,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    steps: int = 1,
    seed: int = 0,
    **settings: Any,
) -> SimulationReport:
    """Synchronise heavy-tailed random gradients for some steps on a simulated network and report what it cost.

    Args:
        workers: how many.
        elements: of the vector that they synchronise.
        config: the settings, or `settings` by name, instead of it or on top of it.
        latency: seconds that a message takes beside its bytes.
        bandwidth: bytes per second of each link.
        steps: how many to simulate.
        seed: of the gradients.

    Returns:
        Figures per step. `conserved` says whether, over every step and coordinate, what all ranks put in equals what
        they got out plus what they kept, to float32 accuracy; `lost_share` is what was missing then, as a share of the
        magnitude put in.

    Raises:
        ConfigError: settings that cannot work.
    """
    config = configure_vector(config, settings)
    if steps < 1:
        raise ConfigError(f"{steps} steps leave nothing to simulate; give 1 or more.")
    cluster = SimulatedCluster(workers, elements, config, latency=latency, bandwidth=bandwidth)
    generator = torch.Generator().manual_seed(seed)
    conserved, lost, entries = True, 0.0, 0
    for _ in range(steps):
        gradients = [torch.randn(elements, generator=generator) ** 3 for _ in range(workers)]
        kept_all, share = _balance(cluster, gradients)
        conserved &= kept_all
        lost += share / steps
    traffic, (group,) = cluster.network.traffic, cluster.ranks[0].groups
    sent, entries = sum(rank.bytes_sent for rank in traffic), sum(cluster.entries_sent())
    return SimulationReport(
        method=config.method,
        workers=workers,
        teams=config.teams_of(workers),
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
        nnz=group.stats.last_entries,
        conserved=conserved,
        lost_share=0.0 if conserved else lost,
    )


def _balance(cluster: SimulatedCluster, gradients: list[Tensor]) -> tuple[bool, float]:
    """Step, and hold the sum of what went in against the sum of what came out and what stayed.

    Returns whether they are equal, on all ranks alike, and the missing share of the step's gradients.
    """
    before = _total(gradients) + _total(cluster.residuals())
    magnitude = _total([gradient.abs() for gradient in gradients]) + _total([r.abs() for r in cluster.residuals()])
    averages = cluster.step(gradients)
    after = len(gradients) * averages[0].double() + _total(cluster.residuals())
    identical = all(torch.equal(averages[0], other) for other in averages[1:])
    missing = (before - after).abs()
    share = float(missing.sum() / _total([gradient.abs() for gradient in gradients]).sum())
    return identical and bool((missing <= 1e-5 * magnitude + 1e-30).all()), share


def _total(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return total
