"""Landing: what an exchange of weights changes, once it is over.

Each rank steps weights of its own; the shared ones are the same bits on all ranks. What a rank has not sent yet is the
difference, shared - own, so nothing can be lost by forgetting to store it. An exchange moves the largest differences:
their mean over ranks leaves the shared weights, and what a rank has sent of its own leaves its difference. Own weights
may have been stepped on in the meantime; what they moved by since the exchange began stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spardl.host import upload
from spardl.kernels import Kernels
from spardl.memory.buffer import Buffer
from spardl.sparse import Ints

if TYPE_CHECKING:
    from spardl.sync.group import Group
    from spardl.sync.step import Outcome, Part
    from spardl.sync.synchronizer import Synchronizer


@dataclass(frozen=True, slots=True)
class Landing:
    """What one tensor receives. Positions are flat, in memory order; None is everywhere.

    agreed  the mean over ranks of what was sent, the same on all of them, at the positions `support`
    sent    what of this rank's difference is gone, at the positions `touched`: it was sent, less what was given back or
            given here to be kept. A position may occur several times, with the same value
    """

    support: Tensor | None
    agreed: Tensor
    touched: Tensor | None
    sent: Tensor

    def on(self, device: torch.device) -> Landing:
        """The same, there."""
        found = [each if each is None else each.to(device, non_blocking=True) for each in self._tensors()]
        support, agreed, touched, sent = found
        assert agreed is not None and sent is not None
        return Landing(support, agreed, touched, sent)

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.support, self.agreed, self.touched, self.sent

    def apply(self, shared: Tensor, own: Tensor, step: Tensor, kernels: Kernels, *, everywhere: bool = False) -> None:
        """Move shared weights by -`step`, and own weights so that only what was sent is gone from their difference.

        The step is given for the support, or `everywhere`. Where all of a difference was sent, own weights become the
        shared ones, to the bit.
        """
        if self.support is not None and self.touched is not None and not everywhere:
            kernels.land(shared, own, self.support, step, self.touched, self.sent)
            return
        touched = slice(None) if self.touched is None else self.touched
        left = shared[touched] - own[touched] - self.sent
        shared -= step
        if self.touched is not None:
            own -= step
        own[touched] = shared[touched] - left


@dataclass(slots=True)
class Changes:
    """What an exchange has taken out of a group's differences, in natural order.

    edges  where each part's begin and end, one after the other; known when the step has been read
    """

    positions: Tensor
    sent: Tensor
    edges: Ints | None = None


def changes(group: Group, outcome: Outcome) -> Changes:
    """What the exchange that was just made has changed. The buffer is of no use afterwards."""
    buffer, journal = group.buffer, group.policy.journal
    assert journal is not None
    positions, sent = journal.changes(buffer)
    natural, sent = buffer.kernels.by_position(_natural(buffer, positions), sent, buffer.layout.length)
    found = Changes(natural, sent)

    def learn(edges: Ints) -> None:
        found.edges = edges

    bounds = upload([bound for _, span in _spans(group, outcome.parts) for bound in span], natural.device)
    group.transaction.health.ask(torch.searchsorted(natural, bounds), learn)
    return found


def landings(group: Group, outcome: Outcome) -> dict[str, Landing]:
    """What each member of a group that has been exchanged, in a step that has been read, receives."""
    return _everywhere(group, outcome) if outcome.averages is None else _somewhere(group, outcome)


def _everywhere(group: Group, outcome: Outcome) -> dict[str, Landing]:
    assert outcome.offered is not None
    found = {}
    for part, (first, stop) in _spans(group, outcome.parts):
        total = torch.empty(stop - first, device=group.buffer.device)
        group.buffer.read(first, total)
        found[part.name] = Landing(None, total.mul_(outcome.factor), None, outcome.offered[first:stop])
    return found


def _somewhere(group: Group, outcome: Outcome) -> dict[str, Landing]:
    changed = outcome.changes
    assert changed is not None and changed.edges is not None
    edges = iter(changed.edges.tolist())
    found = {}
    for part, support, agreed in outcome.shares(group):
        i, j = next(edges), next(edges)
        touched = changed.positions[i:j] - group.offsets[part.name]
        found[part.name] = Landing(torch.as_tensor(support), torch.as_tensor(agreed), touched, changed.sent[i:j])
    return found


def _natural(buffer: Buffer, positions: Tensor) -> Tensor:
    """Where places in a buffer lie in natural order."""
    layout = buffer.layout
    if layout.chunk * layout.count >= layout.length:  # a chunk per block
        return positions
    return buffer.kernels.natural_positions(positions, layout.starts, layout.chunk)


def _spans(group: Group, parts: Sequence[Part]) -> list[tuple[Part, tuple[int, int]]]:
    """Where each part lies in the group, in natural order."""
    return [(part, (at := group.offsets[part.name], at + part.gradient.numel())) for part in parts]


def take_landings(sync: Synchronizer) -> dict[str, Landing]:
    """What all members receive from the last step, if it counts; given out once."""
    found: dict[str, Landing] = {}
    for group in sync.groups:
        found |= group.landings
        group.landings = {}
    return found
