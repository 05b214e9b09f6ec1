"""When the groups of a running model change: a planner merges layers after some steps, or groups follow DDP's buckets.

What depends on times is planned once; what was planned is part of the state, so that a run which is resumed goes on
with the same groups, and one that was saved before its plan makes it in the same step.
"""

from collections.abc import Mapping
from typing import Any

from spardl.config import SyncConfig
from spardl.integrations.buckets import Buckets
from spardl.planning.merging import Merging, agree
from spardl.planning.profile import BackwardClock
from spardl.sync.plan import GroupPlan, Member, plan_group
from spardl.sync.session import Session

WARM_UP = 2  # steps whose backward is not measured, after DDP's buckets are final
MEASURED = 5  # steps that are


class Arranger:
    """Watches backward and buckets until enough is known. `merging` is what a planner has decided, if it has."""

    def __init__(self, config: SyncConfig, buckets: Buckets) -> None:
        self.merging: Merging | None = None
        self._clock = BackwardClock() if config.merge is not None else None
        self._planned: list[GroupPlan] = []  # for after the step
        self._buckets = buckets
        self._idle = buckets.provisional + WARM_UP

    @property
    def watches(self) -> bool:
        """Whether it has to be told of every gradient."""
        return self._clock is not None

    def forward_begins(self) -> None:
        if self._clock is not None:
            self._clock.forward_begins()

    def forward_ends(self) -> None:
        if self._clock is not None:
            self._clock.forward_ends()

    def gradient_is_ready(self, name: str) -> None:
        if self._clock is not None:
            self._clock.stamp(name)

    def before_commit(self, session: Session, sizes: Mapping[str, int], *, momentum: bool) -> None:
        """A step is about to be committed. Measure and plan if it is time: collective, on the communication thread.

        Before, because peers may be lost meanwhile: then the step has not happened.
        """
        done = session.sync.steps + 1
        if self._clock is not None and done > self._idle:
            self._clock.keep()
            if done >= self._idle + MEASURED:
                self._planned = self._merge(session, sizes, self._clock, momentum)

    def plans(self, session: Session, *, counted: bool) -> list[GroupPlan]:
        """A step has ended. The new groups, if it is time for some."""
        planned, self._planned = self._planned, []
        if not planned and counted and session.config.groups == "bucket":
            return self._buckets.plans(session)
        return planned

    def _merge(
        self, session: Session, sizes: Mapping[str, int], clock: BackwardClock, momentum: bool
    ) -> list[GroupPlan]:
        config, transport = session.config, session.transport
        self.merging = agree(config, clock.reading(), sizes, transport, momentum=momentum)
        self._clock = None
        groups = [[Member(name, sizes[name]) for name in names] for names in self.merging.after.groups]
        densities = self.merging.densities or [None] * len(groups)
        return [
            plan_group(config, members, transport.workers, density)
            for members, density in zip(groups, densities, strict=True)
        ]

    def state_dict(self, config: SyncConfig) -> dict[str, Any]:
        """Whether a planner has decided, and which gradients DDP delivers together, if that is known."""
        return {"planned": config.merge is not None and self._clock is None, "buckets": self._buckets.together}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; a plan that was made is not made again."""
        self._buckets.load(state.get("buckets"))
        if state.get("planned"):
            self._clock = None
