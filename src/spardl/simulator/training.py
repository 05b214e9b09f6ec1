"""Whole steps: what a worker does from one step to the next, as a program of the simulator.

With **gradients** a step is forward, backward, exchange, optimizer. The gradient may come in `pieces`, each exchanged
as soon as backward has computed it, one after the other, while backward goes on.

With **local updates** each worker steps its own weights `every` times; then the exchange begins, and training goes on
for `delay` steps before it waits for it. What is exchanged is how far own weights have come, less what was sent before:
the same numbers as a gradient with its residual, so the same group steps serve for both.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spardl.errors import ConfigError
from spardl.simulator.balance import Balance
from spardl.simulator.computing import Costs
from spardl.simulator.driver import Join, Lane, Start, Steps, Work
from spardl.simulator.gradients import Gradients
from spardl.sync.group import Group
from spardl.sync.step import Part, Terms, group_step
from spardl.sync.synchronizer import Synchronizer
from spardl.update import LocalUpdates


@dataclass(frozen=True)
class Training:
    """What a step computes, in seconds, and what is exchanged when.

    pieces  equal groups that the gradient comes in
    update  None for gradients
    local_steps  by rank, local steps between exchanges of workers that take fewer than `update.every`
                 (`update.fitted_steps`)
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    pieces: int = 1
    update: LocalUpdates | None = None
    local_steps: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "optimizer"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} of {seconds} seconds cannot be simulated; give 0 or more.")
        if self.pieces < 1:
            raise ConfigError(f"a gradient in {self.pieces} pieces is none; give 1 or more.")
        if self.update is not None and self.pieces > 1:
            raise ConfigError("with local updates the exchange begins when a step is over; leave the pieces out.")

    @property
    def seconds(self) -> float:
        """What a step computes."""
        return self.forward + self.backward + self.optimizer

    @property
    def every(self) -> int:
        """Steps between two exchanges."""
        return 1 if self.update is None else self.update.every

    def steps_of(self, rank: int) -> int:
        """Steps of one rank between two exchanges."""
        return self.local_steps.get(rank, self.every)


class Cluster:
    """Ranks that train: each with groups of its own, all with one stretch of memory for gradients and results.

    The memory of a gradient is the step's until it is over, as a backup of the residual. Here no step is rolled back
    (gradients are finite), so one stretch serves all ranks, and a rank costs its residual only.
    """

    def __init__(
        self,
        ranks: Sequence[Synchronizer],
        training: Training,
        gradients: Gradients,
        costs: Costs,
        balance: Balance,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.ranks = ranks
        self.training = training
        self.gradients = gradients
        self.costs = costs
        self.balance = balance
        self._progress = progress
        self._done = 0  # groups that were begun, and groups that were committed
        self._firsts: list[int] = []
        elements = 0
        for group in ranks[0].groups:
            self._firsts.append(elements)
            elements += group.plan.elements
        self._memory = torch.zeros(elements)

    def program(self, rank: int, exchanges: int) -> Steps[None]:
        """Everything that a rank does."""
        train = self._by_gradients if self.training.update is None else self._by_updates
        return train(rank, exchanges)

    def _by_gradients(self, rank: int, exchanges: int) -> Steps[None]:
        training = self.training
        for step in range(exchanges):
            yield Work(training.forward, "forward")
            lanes: list[Lane] = []
            for position in range(training.pieces):
                yield Work(training.backward / training.pieces, "backward")
                lanes.append((yield Start(self._exchange(rank, step, position), after=lanes[-1] if lanes else None)))
            yield Join(lanes[-1])
            self._commit(rank, step)
            yield Work(training.optimizer, "optimizer")

    def _by_updates(self, rank: int, exchanges: int) -> Steps[None]:
        update = self.training.update
        assert update is not None
        own = self.training.steps_of(rank)
        under_way: Lane | None = None
        for step in range(exchanges):
            for local in range(own):
                yield from self._local_step()
                if under_way is not None and local + 1 == min(update.delay, own):
                    yield Join(under_way)
                    self._commit(rank, step - 1)
                    under_way = None
            under_way = yield Start(self._exchange(rank, step, 0))
            if not update.delay:
                yield Join(under_way)
                self._commit(rank, step)
                under_way = None
        if under_way is not None:
            yield Join(under_way)
            self._commit(rank, exchanges - 1)

    def _local_step(self) -> Iterator[Work]:
        training = self.training
        yield Work(training.forward, "forward")
        yield Work(training.backward, "backward")
        yield Work(training.optimizer, "optimizer")

    def _exchange(self, rank: int, step: int, position: int) -> Steps[None]:
        sync, costs = self.ranks[rank], self.costs
        group, first = sync.groups[position], self._firsts[position]
        yield Work(costs.per_step + costs.per_element * group.plan.elements, "selecting")
        here = self._memory[first : first + group.plan.elements]
        self.gradients.fill(step, rank, first, here)
        self.balance.put_in(first, here)
        sync.opens(group)
        self._tell(1)
        yield from group_step(group, [Part(group.plan.names[0], here)], Terms(step=step))

    def _commit(self, rank: int, step: int) -> None:
        sync = self.ranks[rank]
        if sync.is_poisoned():
            raise ConfigError("sums of these gradients are not finite, so no step would count; give smaller ones.")
        sync.finish()
        for first, part in self._parts():
            self.balance.get_out(step, first, part)
        self._tell(self.training.pieces)

    def _tell(self, more: int) -> None:
        self._done += more
        if self._progress is not None:
            self._progress(self._done)

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        for group, first in zip(self.ranks[0].groups, self._firsts, strict=True):
            yield first, self._memory[first : first + group.plan.elements]

    def settle(self) -> None:
        """When all ranks are done: what they keep."""
        for position, first in enumerate(self._firsts):
            groups: list[Group] = [sync.groups[position] for sync in self.ranks]
            self.balance.keep(first, groups[0].buffer.layout, [group.buffer.values for group in groups])
