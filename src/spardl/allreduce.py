"""Sparse all-reduce of one flat tensor, without DDP."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spardl.agreement import check_agreement
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.kernels.crew import crew_of_rank
from spardl.metrics import GroupStats
from spardl.sync import Member, Part, Synchronizer
from spardl.transport.choice import transport_named
from spardl.transport.torchdist import Group


@dataclass(frozen=True)
class _Kept:
    """One name's synchronizer, and the process group in whose lifetime it was made."""

    sync: Synchronizer
    world: object


_kept: dict[str, _Kept] = {}


def all_reduce(
    tensor: Tensor, *, name: str = "default", group: Group = None, config: SyncConfig | None = None, **settings: Any
) -> Tensor:
    """Average `tensor` over all ranks, in place, sending only its largest entries. Collective; returns `tensor`.

    What is not sent now is kept under `name` and joins the next call with that name, so use one name for each vector
    that you synchronise again and again. The first call with a name fixes its length, group and settings, until
    `forget` or the end of the process group. A value that is not finite on any rank makes all of them NaN everywhere.
    """
    if not tensor.is_contiguous():
        raise ConfigError("all_reduce works in place on contiguous tensors; call .contiguous() first.")
    if not tensor.is_floating_point():
        raise ConfigError(f"all_reduce averages floating-point tensors, not {tensor.dtype}; convert it first.")
    sync = _find(name)
    if sync is None:
        sync = _make(tensor, name, group, configure(config, settings))
    elif (settings or config not in (None, sync.config)) and configure(config, settings) != sync.config:
        raise ConfigError(f"{name!r} was first synchronised with other settings; forget it first, or use another name.")
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
    sync = _find(name)
    if sync is None:
        raise ConfigError(f"nothing was synchronised under the name {name!r} yet.")
    return sync.stats().total


def forget(name: str = "default") -> None:
    """Drop what is kept under this name."""
    _kept.pop(name, None)


def _find(name: str) -> Synchronizer | None:
    kept = _kept.get(name)
    return kept.sync if kept is not None and kept.world is dist.group.WORLD else None


def _make(tensor: Tensor, name: str, group: Group, config: SyncConfig) -> Synchronizer:
    transport = transport_named(config.transport, group, timeout=config.timeout, device=tensor.device)
    config.resolved_gather(transport.workers)  # teams that cannot work are refused here
    facts = {**config.to_dict(), "name": name, "elements": tensor.numel(), "dtype": str(tensor.dtype)}
    check_agreement(facts, transport.gather_texts, "this all_reduce")
    sync = Synchronizer(config, transport, device=tensor.device, crew=crew_of_rank(transport.gather_texts))
    sync.regroup([[Member(name, tensor.numel())]])
    _kept[name] = _Kept(sync, dist.group.WORLD)
    return sync
