"""A group's memory in one hand: what the step does with it, and what programs do."""

import torch

from spardl import kernels
from spardl.memory.buffer import Buffer
from spardl.memory.memory import Memory
from spardl.memory.residuals import POLICIES
from spardl.memory.transaction import Transaction
from spardl.memory.velocity import Velocity
from spardl.sparse import SparseBlocks
from spardl.wire.frame import Codec

CPU = torch.device("cpu")


class Store:
    """Buffer, velocity, transaction, policy and memory of one group; one tensor called "vector" fills it."""

    def __init__(self, layout, *, residuals="carry", momentum=False, crew=None, values="bf16"):
        kernel = kernels.for_device(CPU)
        self.layout, self.device = layout, CPU
        self.buffer = Buffer(layout, kernel, CPU)
        self._velocity = Velocity(self.buffer) if momentum else None
        self.transaction = Transaction(self.buffer, self._velocity, crew)
        self.policy = POLICIES[residuals]()
        self.memory = Memory(self.transaction, Codec(values, "rice", kernel), self.policy)

    # --- the step -------------------------------------------------------------------------------------------------

    def add(self, offset, gradient, scale=1.0, momentum=None):
        """Lend and add up at once; whether all sums are finite."""
        self.add_later(offset, gradient, scale, momentum)
        health = self.transaction.health
        before = health.is_poisoned()
        health.reset()
        self.transaction.add_up()
        fine = not health.is_poisoned()
        health.note(not before)
        return fine

    def add_later(self, offset, gradient, scale=1.0, momentum=None):
        self.transaction.lend("vector", offset, gradient, scale, momentum)

    def add_up(self, ids=None):
        self.transaction.add_up(ids)

    @property
    def waits(self):
        return self.transaction.waits

    def hold(self, offset, scratch):
        self.transaction.hold("vector", offset, scratch)

    def settle(self, result):
        self.policy.settle(self.buffer, result)

    def commit(self, *, dense=False):
        self.transaction.commit(dense=dense)

    def rollback(self):
        self.policy.forget()
        self.transaction.rollback()

    @property
    def poisoned(self):
        return self.memory.health.is_poisoned()

    # --- what is there --------------------------------------------------------------------------------------------

    @property
    def values(self):
        return self.memory.everything()

    @property
    def velocity(self):
        return self._velocity.values

    @property
    def shortlist(self):
        return self.buffer.listing.shortlist

    def write(self, offset, stretch):
        self.buffer.write(offset, stretch)

    def write_velocity(self, offset, stretch):
        self.buffer.write(offset, stretch, self._velocity.values)
        self._velocity.started.add("vector")

    def natural(self, memory=None):
        """All of it, in natural order."""
        out = torch.empty(self.layout.length)
        self.buffer.read(0, out, self.values if memory is None else memory)
        return out

    # --- programs -------------------------------------------------------------------------------------------------

    def take_above(self, block, threshold, limit):
        found = self.find_above(block, threshold, limit)
        return SparseBlocks(found.ids, found.counts, found.indices, self.memory.take_at(found))

    def take_rounded(self, ids, budgets):
        """The largest entries, rounded, as the values that receivers decode."""
        return self.memory.take_coded(ids, budgets).decode()

    def positions(self, entries):
        return self.memory.addresses.positions(entries)

    def find_above(self, block, threshold, limit):
        found = self.memory.find_above(block, threshold, limit)
        return found.entries(found.count)

    def take_largest_of_all(self, budget):
        return self.memory.addresses.in_blocks(self.memory.take_largest_of_all(budget))

    def take_above_of_all(self, threshold, limit):
        return self.memory.addresses.in_blocks(self.memory.take_above_of_all(threshold, limit))

    def __getattr__(self, name):
        """Every other verb is the memory's, or what it can be asked."""
        for each in (self.memory, self.memory.survey):
            if hasattr(each, name):
                return getattr(each, name)
        return getattr(self.memory.addresses, name)
