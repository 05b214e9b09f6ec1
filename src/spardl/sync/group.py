"""Group: a plan at work on one rank, with its memory and its method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spardl.collectives.method import Method, Seat
from spardl.collectives.methods.registry import method_class
from spardl.kernels import Kernels
from spardl.kernels.cpu.crew import Crew
from spardl.memory.buffer import Buffer
from spardl.memory.memory import Memory
from spardl.memory.residuals import POLICIES, Journal
from spardl.memory.transaction import Transaction
from spardl.memory.velocity import Velocity
from spardl.metrics import GroupStats
from spardl.sync.plan import GroupPlan, Member
from spardl.wire.frame import Codec

if TYPE_CHECKING:
    from spardl.sync.landing import Landing
    from spardl.sync.step import Outcome


class Group:
    """Members in order, one buffer for all of them, and the method that synchronises it.

    `dense` is the method for steps in which the schedule sends everything. `outcome` is the step that is open. Of
    weights, the buffer is of use within a step only, and `landings` are what the last one has for each member.
    """

    def __init__(
        self,
        plan: GroupPlan,
        *,
        rank: int,
        workers: int,
        kernels: Kernels,
        device: torch.device,
        momentum: bool = False,
        of_weights: bool = False,
        crew: Crew | None = None,
        common: dict[str, Any] | None = None,
    ) -> None:
        sizes = tuple(member.elements for member in plan.members)
        seat = Seat(rank, workers, plan.elements, plan.options, sizes, plan.title, {} if common is None else common)
        self.plan = plan
        self.workers = workers
        self.method: Method = method_class(plan.method)(seat)
        self.dense: Method = self.method if plan.is_dense else method_class("dense")(seat)
        self.buffer = Buffer(self.method.layout, kernels, device)
        self.velocity = Velocity(self.buffer) if momentum else None
        self.of_weights = of_weights
        self.policy = POLICIES[plan.residuals](Journal() if of_weights else None)
        self.transaction = Transaction(self.buffer, self.velocity, crew)
        self.memory = Memory(self.transaction, Codec(plan.values, plan.indices, kernels), self.policy)
        self.stats = GroupStats(plan.title, plan.elements, dense=plan.is_dense)
        self.span = (0.0, 0.0)  # begin and end of the last exchange, by time.perf_counter
        self.outcome: Outcome | None = None
        self.landings: dict[str, Landing] = {}
        self.offsets: dict[str, int] = {}
        offset = 0
        for member in plan.members:
            self.offsets[member.name] = offset
            offset += member.elements

    def residual(self, member: Member) -> Tensor:
        """A copy of a member's residual, in memory order."""
        return self._read(member, self.buffer.values)

    def velocity_of(self, member: Member) -> Tensor | None:
        """A copy of a member's velocity, in memory order, if there is any."""
        return None if self.velocity is None else self._read(member, self.velocity.values)

    def write(self, name: str, residual: Tensor | None = None, velocity: Tensor | None = None) -> None:
        """Set a member's residual and velocity. Between steps."""
        assert self.outcome is None, "memory belongs to the step until it is over"
        if residual is not None:
            self.buffer.write(self.offsets[name], residual)
        if velocity is not None and self.velocity is not None:
            self.buffer.write(self.offsets[name], velocity, self.velocity.values)

    def _read(self, member: Member, values: Tensor) -> Tensor:
        out = torch.empty(member.elements, device=self.buffer.device)
        self.buffer.read(self.offsets[member.name], out, values)
        return out
