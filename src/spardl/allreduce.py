"""Sparse all-reduce of one flat tensor, without DDP."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.metrics import GroupStats
from spardl.sync import Member, Part, Synchronizer
from spardl.transport.torchdist import Group, TorchTransport

_synchronizers: dict[str, Synchronizer] = {}


def all_reduce(
    tensor: Tensor, *, name: str = "default", group: Group = None, config: SyncConfig | None = None, **settings: Any
) -> Tensor:
    """Average `tensor` over all ranks, in place, sending only its largest entries. Collective; returns `tensor`.

    What is not sent now is kept under `name` and joins the next call with that name, so use one name for each vector
    that you synchronise again and again. The first call with a name fixes its length, group and settings.
    """
    if not tensor.is_contiguous():
        raise ConfigError("all_reduce works in place on contiguous tensors; call .contiguous() first.")
    sync = _synchronizers.get(name)
    if sync is None:
        chosen = config if config is not None else SyncConfig(**settings)
        chosen.resolved_gather(dist.get_world_size())
        transport = TorchTransport(group, timeout=chosen.timeout, device=tensor.device)
        sync = Synchronizer(chosen, transport, device=tensor.device)
        sync.regroup([[Member(name, tensor.numel())]])
        _synchronizers[name] = sync
    (only,) = sync.groups
    if only.stats.elements != tensor.numel():
        raise ConfigError(
            f"{name!r} was first synchronised with {only.stats.elements} elements, now with {tensor.numel()};"
            " use another name for another vector."
        )
    sync.begin()
    sync.synchronize(only, [Part(name, tensor.detach().view(-1))])
    sync.finish()
    return tensor


def stats_of(name: str = "default") -> GroupStats:
    """What the calls with this name have cost on this rank so far."""
    if name not in _synchronizers:
        raise ConfigError(f"nothing was synchronised under the name {name!r} yet.")
    return _synchronizers[name].stats().total


def forget(name: str = "default") -> None:
    """Drop what is kept under this name."""
    _synchronizers.pop(name, None)
