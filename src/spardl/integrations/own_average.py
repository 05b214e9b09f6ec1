"""DDP's own average, where nothing of ours is in between: what is clipped and counted there.

(This module must not postpone annotations: DDP compares the hook's with the real types.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from spardl.errors import ConfigError
from spardl.metrics import GroupStats
from spardl.transport.ring import ring_share

FLOAT_BYTES = 4


class OwnAverage:
    """Steps that DDP averages itself.

    steps      how many there were
    awaited    whether one has begun that is not counted yet
    clip_norm  of the average, just before an optimizer steps
    """

    def __init__(self, parameters: Mapping[str, Tensor], clip_norm: float | None) -> None:
        self.steps = 0
        self.awaited = False
        self.clip_norm = clip_norm
        self._parameters = parameters
        self._clipped = True  # whether the gradients that are there have been
        self._under_way: list[dist.Work] = []  # all-reduces of one step

    def begin(self, *, awaited: bool) -> None:
        """A step begins; `awaited`: no hook will see it, so `count` does."""
        self.awaited, self._clipped = awaited, False

    def count(self) -> None:
        """A step without a hook is over, if one had begun."""
        self.steps += self.awaited
        self.awaited = False

    def clip(self, *_: Any) -> None:
        """An optimizer is about to step by this average, which nobody has clipped yet; sparse ways do so before."""
        if self.clip_norm is not None and not self._clipped:
            clip_grad_norm_(self._parameters.values(), self.clip_norm)
            self._clipped = True

    def average(self, bucket: dist.GradBucket, group: Any) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """As DDP would without a hook. On a CPU a future that completes by itself would wake up Python for each bucket;
        instead the last one, after which DDP has nothing else to do, waits for all."""
        self.steps += bucket.is_last()
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._under_way.clear()
        if buffer.device.type == "cpu" and buffer.layout is torch.strided:
            mine = buffer.div_(dist.get_world_size(group))
            self._under_way.append(dist.all_reduce(mine, group=group, async_op=True))
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
        else:
            future = allreduce_hook(group, bucket)
        if bucket.is_last():
            for work in self._under_way:
                work.wait()
        return future

    def stats(self, elements: int, workers: int) -> GroupStats:
        """What DDP has sent, counted as of a ring, and not timed."""
        found = GroupStats("all, by DDP", elements, dense=True, steps=self.steps)
        found.entries = found.entries_sent = found.last_entries = self.steps * elements
        found.bytes_sent = round(found.entries * FLOAT_BYTES * ring_share(workers))
        return found


def check_clip(clip_norm: float | None, optimizers: Sequence[Optimizer]) -> None:
    """Raise `ConfigError` where nobody could say when to clip DDP's average."""
    if clip_norm is not None and not optimizers:
        raise ConfigError(
            "clip_norm clips before a selection, and where dense is chosen just before the optimizer steps; give"
            " optimizer=... too."
        )
