"""Simulated workers that are given their gradients, step by step: the product's own step, memory and frames."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spardl import kernels
from spardl.collectives.program import side_by_side
from spardl.config import SyncConfig
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
        programs = []
        for rank, sync in enumerate(self.ranks):
            rule = rules[rank] if rules is not None else {}
            steps = []
            for group in sync.groups:
                parts = [Part(name, own[rank][name], rule.get(name)) for name in group.offsets]
                sync.opens(group)
                steps.append(group_step(group, parts, agreed))
            programs.append(side_by_side(steps))
        self.network.run(programs)
        self.outcomes = [outcome for sync in self.ranks if (outcome := sync.groups[-1].outcome) is not None]
        for sync in self.ranks:
            sync.finish()
        return own

    def residuals(self) -> list[Tensor]:
        """Each rank's residual, all tensors one after the other."""
        return [torch.cat([kept.residual for kept in sync.kept().values()]) for sync in self.ranks]

    def entries_sent(self) -> list[int]:
        """Indices that have left each rank so far."""
        return [sum(group.memory.frames.account.entries for group in sync.groups) for sync in self.ranks]
