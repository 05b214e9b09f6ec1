"""DDP without its all-reduce: gradients stay each rank's own.

(This module must not postpone annotations: DDP compares the hook's with the real types.)
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.errors import ConfigError


def passing_hook(state: "PassingDDP", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The hook that DDP is given: a bucket is its own result, until `PassingDDP.end`."""
    return state.take(bucket.buffer())


class PassingDDP:
    """A DDP model whose gradients and buffers are no longer exchanged. DDP cannot drop a hook, so this one stays."""

    def __init__(self, model: DistributedDataParallel) -> None:
        if _torch_private.has_comm_hook(model):
            raise ConfigError(
                "this model has a communication hook already, and DDP takes only one; give the plain module to attach."
            )
        self._model = model
        self._passes = True
        self._broadcasts = model.broadcast_buffers
        model.broadcast_buffers = False
        model.register_comm_hook(self, passing_hook)

    @classmethod
    def of(cls, model: nn.Module) -> "PassingDDP | None":
        """Switch a model's all-reduce off, if DDP has wrapped it."""
        inner = _torch_private.uncompiled(model)
        return cls(inner) if isinstance(inner, DistributedDataParallel) else None

    def take(self, gradients: Tensor) -> Future[Tensor]:
        """What becomes of one bucket."""
        future: Future[Tensor] = Future()
        if not self._passes:
            dist.all_reduce(gradients, group=self._model.process_group)
            gradients /= dist.get_world_size(self._model.process_group)
        future.set_result(gradients)
        return future

    def end(self) -> None:
        """Average densely from now on."""
        self._passes = False
        self._model.broadcast_buffers = self._broadcasts

    # Copies of a model do not carry its synchronisation along.

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[object, ...]:
        return (_none, ())


def _none() -> None:
    return None
