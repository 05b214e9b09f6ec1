"""Simulated clusters that keep to the method that they are given, however short the vector and few the workers."""

import math
from dataclasses import replace

import torch

from spardl import kernels
from spardl.simulator.cluster import VECTOR, SimulatedCluster
from spardl.simulator.driver import Driver
from spardl.simulator.network import Network
from spardl.sync.landing import take_landings
from spardl.sync.plan import Member, plan_group
from spardl.sync.step import Part, Terms, group_step
from spardl.sync.synchronizer import Synchronizer


class Cluster(SimulatedCluster):
    """One vector per worker; what is inside each rank, by rank."""

    def __init__(self, workers, elements, config, **more):
        asked = replace(config, dense_below=0)
        plan = plan_group(asked, [Member(VECTOR, elements)], max(2, workers))
        super().__init__(workers, elements, asked, plans=[plan], **more)

    @property
    def _groups(self):
        return [sync.groups[0] for sync in self.ranks]

    @property
    def methods(self):
        return [group.method for group in self._groups]

    @property
    def memories(self):
        return [group.memory for group in self._groups]

    @property
    def supports(self):
        """Positions of the last result's entries, by rank."""
        return [outcome.averages[0] for outcome in self.outcomes]

    @property
    def poisoned(self):
        return [outcome.poisoned for outcome in self.outcomes]


class WeightCluster:
    """Workers with weights of their own that exchange how far these are from the shared ones, in one process."""

    def __init__(self, workers, weights, config):
        elements, self.workers = weights.numel(), workers
        plan = plan_group(replace(config, dense_below=0), [Member(VECTOR, elements)], max(2, workers))
        self.network = Driver(Network.switch(workers, latency=0.0, bandwidth=math.inf))
        self.kernels = kernels.for_device(torch.device("cpu"))
        self.ranks = [Synchronizer(rank, workers, kernels=self.kernels, of_weights=True) for rank in range(workers)]
        for sync in self.ranks:
            sync.regroup([plan])
        self.shared = [weights.clone() for _ in range(workers)]
        self.own = [weights.clone() for _ in range(workers)]

    def begin(self):
        """Exchange differences; what it brings is returned by rank, None if the step does not count."""
        programs = []
        for sync, shared, own in zip(self.ranks, self.shared, self.own, strict=True):
            sync.opens(sync.groups[0])
            part = Part(VECTOR, own, shared=shared)
            programs.append(group_step(sync.groups[0], [part], Terms(step=sync.steps)))
        self.network.run(programs)
        counted = [sync.finish() for sync in self.ranks]
        landings = [take_landings(sync) for sync in self.ranks]
        return [found[VECTOR] if fine else None for fine, found in zip(counted, landings, strict=True)]

    def land(self, landings, rate=1.0):
        for landing, shared, own in zip(landings, self.shared, self.own, strict=True):
            landing.apply(shared, own, landing.agreed * rate, self.kernels)
