"""Who takes part, and where they find each other, by the process group that they were given.

Most groups are torch's: their ranks are numbered in the default group, through whose store they meet. Others are
configured again and again, with other ranks each time (torchft's), and torch knows nothing of those: what such a group
is at the moment, it says itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spardl import _torch_private
from spardl.errors import ConfigError

Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Members:
    """The ranks of a group.

    ranks  in synchronisation order, as the default group numbers them; of a configured group just 0, 1, ...
    rank   this one's place among them
    store  through which they meet; None where torch hides it
    world  what they live as long as: the default group, or this configuration of theirs
    known  whether torch knows these ranks, and can make groups of them
    """

    ranks: list[int]
    rank: int
    store: Any
    world: object
    known: bool = True


def members_of(group: Group) -> Members:
    """Who is in this group now; default: all.

    Raises:
        ConfigError: there is no process group, this rank is not in it, or it was not configured yet.
    """
    if is_configured_anew(group):
        inner = _behind(group)
        store = _torch_private.group_store(inner)
        if store is None:
            raise ConfigError(f"{group!r} does not say through which store its ranks meet; take torchft's over gloo.")
        return Members(list(range(inner.size())), inner.rank(), store, inner, known=False)
    if not dist.is_initialized():
        raise ConfigError("there is no process group; call torch.distributed.init_process_group first.")
    ranks = member_ranks(group)
    if dist.get_rank() not in ranks:
        raise ConfigError(f"rank {dist.get_rank()} is not in the group {ranks} that it should synchronise with.")
    return Members(ranks, ranks.index(dist.get_rank()), _torch_private.default_store(), dist.group.WORLD)


def member_ranks(group: Group) -> list[int]:
    """Ranks in synchronisation order; a two-dimensional mesh lists team after team."""
    if isinstance(group, DeviceMesh):
        return [int(rank) for rank in np.asarray(group.mesh.cpu()).flatten()]
    if is_configured_anew(group):
        return list(range(_behind(group).size()))
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def world_of(group: Group) -> object:
    """What the ranks of this group live as long as (`Members.world`)."""
    return _behind(group) if is_configured_anew(group) else dist.group.WORLD


def is_configured_anew(group: object) -> bool:
    """Whether this group gets other ranks from time to time."""
    return isinstance(group, dist.ProcessGroup) and callable(getattr(group, "configure", None))


def _behind(group: Any) -> Any:
    """The group of torch's that does the work at the moment."""
    try:
        while hasattr(type(group), "parent"):
            group = group.parent
    except AssertionError as error:
        raise ConfigError("this process group was not configured yet; wait for its first quorum.") from error
    return group
