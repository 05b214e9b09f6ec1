"""A state comes from a file: whatever is in it, it is refused in a sentence, or the next step works."""

import copy
import random

import pytest
import torch

from clusters import Cluster
from mutations import mutated
from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig
from spardl.errors import StateError
from spardl.sync import state as states

WORKERS, LENGTH = 3, 400
CASES = 25


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(LENGTH, generator=generator) for _ in range(WORKERS)]


def trained(config: SyncConfig) -> Cluster:
    cluster = Cluster(WORKERS, LENGTH, config)
    for step in range(3):
        cluster.step(gradients(step))
    return cluster


@pytest.mark.parametrize("method", METHODS)
def test_an_altered_state_is_refused_or_the_next_step_works(method: str) -> None:
    """One place of one rank's state is altered, many times over: no other error, no crash, nothing that is not finite.

    What was refused has changed nothing, so that the right state still continues exactly.
    """
    config = SyncConfig(method=method, density=0.1, dense_below=0)
    cluster, chance = trained(config), random.Random(method)
    before = [states.save(sync) for sync in cluster.ranks]
    expected = cluster.step(gradients(3))[0]
    refused = 0
    for case in range(CASES):
        for sync, saved in zip(cluster.ranks, before, strict=True):
            states.load(sync, config, copy.deepcopy(saved), regroup=True)
        rank = case % WORKERS
        try:
            states.load(cluster.ranks[rank], config, mutated(before[rank], chance), regroup=bool(case % 2))
        except StateError:
            refused += 1
            assert torch.equal(cluster.step(gradients(3))[0], expected), f"case {case} has changed something"
        else:
            everybody_loads(cluster, config, before, rank)
            assert bool(torch.isfinite(cluster.step(gradients(3))[0]).all()), f"case {case}"
    assert refused > CASES / 4


def everybody_loads(cluster: Cluster, config: SyncConfig, before: list[object], rank: int) -> None:
    """All ranks have what the altered one has in common with them: a real run compares that before it goes on."""
    altered = states.save(cluster.ranks[rank])
    for other, sync in enumerate(cluster.ranks):
        own = copy.deepcopy(before[other])
        assert isinstance(own, dict)
        common = {name: altered[name] for name in ("methods", "steps", "groups", "densities")}
        states.load(sync, config, {**own, **common}, regroup=True)
