"""DDP's buckets: which gradients arrive together, and where in DDP's memory each one lies."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from spardl.errors import StateError
from spardl.sync.plan import GroupPlan, plan_group
from spardl.sync.session import Session


class Buckets:
    """The buckets of one model. DDP makes its final ones after `provisional` steps.

    `views` are where each gradient lies, and `together` which arrive as one, once both are final.
    """

    def __init__(self, names: Mapping[Parameter, str], provisional: int) -> None:
        self.provisional = provisional
        self.views: dict[str, Tensor] = {}
        self.together: list[list[str]] = []
        self._names = names
        self._steps = 0
        self._present: list[list[str]] = []

    def begin(self) -> None:
        """A step begins."""
        self._steps += 1
        self._present = []

    def end(self) -> None:
        """All buckets of the step have arrived."""
        if self._are_final:
            self.together = self._present

    def parts(
        self, parameters: Sequence[Parameter], buffer: Tensor, *, in_backward: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """The gradients of one bucket, by name, as flat views in memory order.

        A rank that has joined early (DDP's Join) gets buckets outside any backward, which lie elsewhere.
        """
        self._present.append([self._names[parameter] for parameter in parameters])
        for name, gradient in zip(
            self._present[-1], buffer.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            if self._are_final and in_backward:
                self.views[name] = gradient
            yield name, gradient

    def plans(self, session: Session) -> list[GroupPlan]:
        """A group for each bucket, if it is time for that and they are not the session's yet; else none.

        It is time when a run that was resumed before its buckets were final knows them too.
        """
        if not self.together or session.sync.steps < 2 * (self.provisional + 1):
            return []
        if [plan.names for plan in session.plan] == self.together:
            return []
        sizes = {member.name: member for plan in session.plan for member in plan.members}
        workers = session.transport.workers
        return [plan_group(session.config, [sizes[name] for name in names], workers) for names in self.together]

    @property
    def _are_final(self) -> bool:
        return self._steps > self.provisional

    def load(self, saved: object) -> None:
        """What `together` was when a state was saved."""
        if not isinstance(saved, list) or not all(isinstance(names, list) for names in saved):
            raise StateError("this state has no usable buckets; load the state of the same model.")
        self.together = saved
