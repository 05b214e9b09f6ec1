"""Sparse all-reduce of one flat tensor, without DDP: sugar on sessions that are kept from call to call.

All names that are synchronised between the same ranks, by the same transport and on the same device, share one session,
and with it one mesh of connections.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spardl.agreement import check_agreement
from spardl.config import SyncConfig, configure_vector
from spardl.errors import ConfigError, StateError
from spardl.metrics import GroupStats
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session, shared_settings
from spardl.transport.members import Group, is_configured_anew, member_ranks, members_of, world_of

Key = tuple[Any, ...]  # the world and the group that it is a configuration of, then what sessions differ in


@dataclass(frozen=True)
class _Kept:
    """One name's session and settings, the group it was given, and what that has lived as long as then."""

    session: Session
    config: SyncConfig
    ranks: tuple[int, ...]
    elements: int
    dtype: str
    group: Group
    world: object


_sessions: dict[Key, Session] = {}
_kept: dict[str, _Kept] = {}


def all_reduce(
    tensor: Tensor, *, name: str = "default", group: Group = None, config: SyncConfig | None = None, **settings: Any
) -> Tensor:
    """Average `tensor` over all ranks, in place, sending only its largest entries. Collective.

    What is not sent now is kept under `name` and joins the next call with that name, so use one name for each vector
    that you synchronise again and again. The first call with a name fixes its length, type, group and settings, until
    `forget` or the end of the process group; one that is configured anew, as torchft's, has ended too. A value that is
    not finite on any rank makes all of them NaN everywhere.

    Args:
        tensor: contiguous, floating-point.
        name: of this vector, the same on all ranks.
        group: the ranks that take part; default: all.
        config: settings as one object.
        settings: fields of `SyncConfig` and options of the method, instead of or on top of `config`.

    Returns:
        The tensor itself.

    Raises:
        ConfigError: a tensor or settings that cannot work, or others than in the first call with this name.
        ConfigMismatch: two ranks differ in length, type or settings.
        PeerError: a rank is gone or silent.
    """
    if not tensor.is_contiguous():
        raise ConfigError("all_reduce works in place on contiguous tensors; call .contiguous() first.")
    if not tensor.is_floating_point():
        raise ConfigError(f"all_reduce averages floating-point tensors, not {tensor.dtype}; convert it first.")
    kept = _find(name)
    if kept is None:
        kept = _kept[name] = _begin(tensor, name, group, configure_vector(config, settings))
    else:
        _check(kept, tensor, name, group, config, settings)
    kept.session.reduce(name, tensor.detach().view(-1))
    return tensor


def stats_of(name: str = "default") -> GroupStats:
    """What the calls with this name have cost on this rank so far.

    Raises:
        StateError: there were none.
    """
    kept = _find(name)
    if kept is None:
        raise StateError(f"nothing was synchronised under the name {name!r} yet.")
    return next(stats for stats in kept.session.stats().groups if stats.name == name)


def forget(name: str = "default") -> None:
    """Drop what is kept under this name, its residual included. The next call with it may have another length."""
    kept = _kept.pop(name, None)
    if kept is not None:
        kept.session.exclude(name)


def _find(name: str) -> _Kept | None:
    kept = _kept.get(name)
    return kept if kept is not None and kept.world is world_of(kept.group) else None


def _begin(tensor: Tensor, name: str, group: Group, config: SyncConfig) -> _Kept:
    """A group of its own for this name, in the session that it shares with others. Collective."""
    session = _session(tensor, group, config)
    workers = session.transport.workers
    config.check_for(workers)
    facts = {**shared_settings(config), "name": name, "elements": tensor.numel(), "dtype": str(tensor.dtype)}
    check_agreement(facts, session.transport.gather_texts, "this all_reduce")
    session.include(plan_group(config, [Member(name, tensor.numel())], workers))
    ranks = tuple(member_ranks(group))
    return _Kept(session, config, ranks, tensor.numel(), str(tensor.dtype), group, world_of(group))


def _session(tensor: Tensor, group: Group, config: SyncConfig) -> Session:
    members, anew = members_of(group), group if is_configured_anew(group) else None
    for ended in [key for key in _sessions if key[0] is not world_of(key[1])]:
        del _sessions[ended]  # of a process group that is no more
    key = (
        members.world,
        anew,
        tuple(members.ranks),
        config.transport,
        config.timeout,
        str(tensor.device),
        config.encrypt,
    )
    if key not in _sessions or _sessions[key].worker.failure is not None:
        _sessions[key] = Session.open(
            [], config, process_group=group, device=tensor.device, commit="group", subject="this all_reduce"
        )
    return _sessions[key]


def _check(
    kept: _Kept, tensor: Tensor, name: str, group: Group, config: SyncConfig | None, settings: dict[str, Any]
) -> None:
    """Whether this call goes on with what the first one with this name began."""
    if (settings or config is not None) and configure_vector(config, settings) != kept.config:
        raise ConfigError(
            f"{name!r} was first synchronised with other settings; call spardl.forget({name!r}) first, or use another"
            " name."
        )
    if kept.elements != tensor.numel() or kept.dtype != str(tensor.dtype):
        raise ConfigError(
            f"{name!r} was first synchronised with {kept.elements} elements of {kept.dtype}, now with {tensor.numel()}"
            f" of {tensor.dtype}; use another name for another vector."
        )
    if tuple(member_ranks(group)) != kept.ranks:
        raise ConfigError(
            f"{name!r} was first synchronised between ranks {list(kept.ranks)}, now between {member_ranks(group)}; use"
            " another name for another group."
        )
