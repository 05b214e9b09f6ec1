"""`attach`: one line on a model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.integrations.auto import AUTO, AutoSync
from spardl.integrations.auto_local import AutoLocalSync
from spardl.integrations.ddp import SparDLState, spardl_hook
from spardl.integrations.handle import SyncHandle
from spardl.integrations.local import LocalSync
from spardl.integrations.model import COMPILED, plain_module, unwrap
from spardl.integrations.optim.adam import LocalAdam
from spardl.integrations.optim.choice import Given, optimizers_of
from spardl.integrations.setup import check_scaler, with_teams
from spardl.planning.candidates import DENSE
from spardl.planning.planfile import PlanFile
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
    plan: str | Path | None = None,
    **settings: Any,
) -> SyncHandle:
    """Synchronise this model sparsely from now on. Collective: every rank calls it, once, in the same way.

    With method="auto" it measures lines and exchanges for a second or two, takes what is quickest, dense included, and
    looks again while training goes on. Density, values and update rule stay those that were asked for.

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
        plan: a file that `spardl plan` has written for this model and as many workers, instead of a method; settings
            that are given beside it count more.
        settings: fields of `SyncConfig`, options of the method, and fields of `LocalUpdates`, on top of these.

    Returns:
        The handle: `stats()`, `state_dict()`, `load_state_dict()`, `detach()`; of local updates also `shared()` and
        `flush()`.

    Raises:
        ConfigError: settings that cannot work.
        ConfigMismatch: two ranks differ in settings or model.
        PeerError: a rank did not come.
    """
    if plan is not None:
        update, settings = planned(plan, model, process_group, update, {"config": config, **settings})
        settings.pop("config")
    rule, others = resolve(update, settings)
    given: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler, "team_size": team_size, "config": config}
    chooses = others.get("method") == AUTO
    if chooses:
        del others["method"]
    if rule is not None:
        return attach_locally(model, rule, process_group, chooses=chooses, **given, **others)
    ddp = unwrap(model)
    if chooses:
        return AutoSync(ddp, process_group, **given, **others)
    if plan is not None and others["method"] == DENSE:  # DDP does that best by itself
        return AutoSync(ddp, process_group, **given, **others, chooses=False)
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
    chooses: bool = False,
    **settings: Any,
) -> LocalSync:
    """`attach` for local updates; `chooses`: by what method is to be measured."""
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
    kind = AutoLocalSync if chooses else LocalSync
    return kind(model, optimizers, chosen, rule, scaler=scaler, process_group=where)


def planned(
    path: str | Path, model: nn.Module, process_group: Group, update: str | LocalUpdates, settings: dict[str, Any]
) -> tuple[str | LocalUpdates, dict[str, Any]]:
    """The update rule and the settings of a plan, with those that were given beside it on top.

    Raises:
        ConfigError: there is no such plan, it is damaged, or it was made for another model or number of workers.
    """
    if settings["config"] is not None:
        raise ConfigError("give plan=... or config=..., not both; settings beside a plan count more than its own.")
    plan = PlanFile.read(path)
    inner = plain_module(model)
    sizes = {name.replace(COMPILED, ""): p.numel() for name, p in inner.named_parameters() if p.requires_grad}
    where = process_group
    if where is None and isinstance(_torch_private.uncompiled(model), DistributedDataParallel):
        where = unwrap(model).process_group
    plan.check_for(len(member_ranks(where)), sizes)
    rule = plan.update if update == GRADIENTS else update
    return rule, {**plan.settings, **settings}
