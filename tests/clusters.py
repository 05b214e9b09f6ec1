"""Simulated clusters that keep to the method that they are given, however short the vector and few the workers."""

from dataclasses import replace

from spardl.simulator.cluster import VECTOR, SimulatedCluster
from spardl.sync.plan import Member, plan_group


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
        return [outcome.averages[0][0] for outcome in self.outcomes]

    @property
    def poisoned(self):
        return [outcome.poisoned for outcome in self.outcomes]
