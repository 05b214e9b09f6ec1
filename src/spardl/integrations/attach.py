"""`attach`: one line on a model."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.integrations.ddp import SparDLState, spardl_hook
from spardl.integrations.handle import SyncHandle
from spardl.integrations.local import LocalSync
from spardl.integrations.model import unwrap
from spardl.integrations.optim.adam import LocalAdam
from spardl.integrations.optim.choice import Given, optimizers_of
from spardl.integrations.setup import check_scaler, with_teams
from spardl.transport.torchdist import Group, member_ranks
from spardl.update import GRADIENTS, LocalUpdates, check_beside, resolve


def attach(
    model: nn.Module,
    *,
    optimizer: Given = None,
    update: str | LocalUpdates = GRADIENTS,
    scaler: torch.amp.GradScaler | None = None,
    process_group: Group = None,
    team_size: int | None = None,
    config: SyncConfig | None = None,
    **settings: Any,
) -> SyncHandle:
    """Synchronise this model sparsely from now on. Collective: every rank calls it, once, in the same way.

    Args:
        model: for gradients, wrapped in DistributedDataParallel; for local updates any module. Compiled or not.
        optimizer: what steps this model, or a list of several. Local updates leave it as it is. With gradients,
            momentum and weight decay of an SGD move before the selection, where they belong; False says that there is
            none to move.
        update: "gradients", as the papers have it; "local", where ranks step weights of their own and exchange how far
            these have come; or the name of a published way of doing that (`spardl.update.PRESETS`).
        scaler: the GradScaler in use.
        process_group: a group or a DeviceMesh (two dimensions: teams x members); default: DDP's own ranks, or all.
        team_size: workers per team, instead of `teams`.
        config: settings as one object.
        settings: fields of `SyncConfig`, options of the method, and fields of `LocalUpdates`, on top of these.

    Returns:
        The handle: `stats()`, `state_dict()`, `load_state_dict()`, `detach()`; of local updates also `shared()` and
        `flush()`.

    Raises:
        ConfigError: settings that cannot work.
        ConfigMismatch: two ranks differ in settings or model.
        PeerError: a rank did not come.
    """
    rule, others = resolve(update, settings)
    given: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler, "team_size": team_size, "config": config}
    if rule is not None:
        return attach_locally(model, rule, process_group, **given, **others)
    ddp = unwrap(model)
    state = SparDLState(ddp, process_group, **given, **others)
    ddp.register_comm_hook(state, spardl_hook)
    return state


def attach_locally(
    model: nn.Module,
    rule: LocalUpdates,
    process_group: Group,
    *,
    optimizer: Given,
    scaler: torch.amp.GradScaler | None,
    team_size: int | None,
    config: SyncConfig | None,
    **settings: Any,
) -> LocalSync:
    """`attach` for local updates."""
    optimizers = optimizers_of(optimizer)
    if any(isinstance(each, LocalAdam) for each in optimizers):
        raise ConfigError("LocalAdam is for gradients; with local updates use torch.optim.AdamW as it is.")
    check_scaler(scaler, optimizers)
    inner = _torch_private.uncompiled(model)
    if not isinstance(inner, nn.Module):
        raise ConfigError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    where = process_group
    if where is None and isinstance(inner, DistributedDataParallel):
        where = inner.process_group
    chosen = with_teams(configure(config, settings), process_group, team_size, len(member_ranks(where)))
    check_beside(chosen)
    return LocalSync(model, optimizers, chosen, rule, scaler=scaler, process_group=where)
