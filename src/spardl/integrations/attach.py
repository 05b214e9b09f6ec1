"""`attach`: one line on a model."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spardl import _torch_private
from spardl.choices import check_choice
from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError, SparDLWarning
from spardl.integrations.at_step import StepSync
from spardl.integrations.auto import AUTO, AutoSync
from spardl.integrations.auto_local import AutoLocalSync
from spardl.integrations.ddp import SparDLState, spardl_hook
from spardl.integrations.handle import SyncHandle
from spardl.integrations.local import LocalSync
from spardl.integrations.model import COMPILED, plain_module, unwrap
from spardl.integrations.optim.choice import Given, has_memory, optimizers_of, warn_of_losses
from spardl.integrations.parts import check_readable, is_fsdp
from spardl.integrations.setup import check_scaler, with_teams
from spardl.planning.candidates import DENSE
from spardl.planning.planfile import PlanFile
from spardl.transport.invitation import Invitation
from spardl.transport.members import Group, member_ranks
from spardl.update import GRADIENTS, LocalUpdates, check_beside, resolve

LOCALLY = 'update="local" takes any optimizer as it is, and loses nothing by it.'
ONLY_SETTINGS = "who joins a run gives its settings, and no group, team_size or method to be chosen."


def attach(
    model: nn.Module,
    *,
    optimizer: Given = None,
    update: str | LocalUpdates = GRADIENTS,
    scaler: torch.amp.GradScaler | None = None,
    process_group: Group = None,
    replicate: Group = None,
    when: str | None = None,
    team_size: int | None = None,
    config: SyncConfig | None = None,
    plan: str | Path | None = None,
    invitation: str | None = None,
    **settings: Any,
) -> SyncHandle:
    """Synchronise this model sparsely from now on. Collective: every rank calls it, once, in the same way.

    With method="auto" it measures lines and exchanges for a second or two, takes what is quickest, dense included, and
    looks again while training goes on. Density, values and update rule stay those that were asked for.

    Args:
        model: for gradients, wrapped in DistributedDataParallel, or any module with `when` or `replicate`; for local
            updates any module. Compiled or not.
        optimizer: what steps this model, or a list of several. Local updates leave it as it is. With gradients,
            momentum and weight decay of an SGD move before the selection, where they belong; False says that there is
            none to move.
        update: "gradients", as the papers have it; "local", where ranks step weights of their own and exchange how far
            these have come; or the name of a published way of doing that (`spardl.update.PRESETS`).
        scaler: the GradScaler in use.
        process_group: a group or a DeviceMesh (two dimensions: teams x members); default: DDP's own ranks, or all.
        replicate: of a model that lies in parts (FSDP2, tensor parallel): the ranks that hold the same part of other
            replicas, as a dimension of the mesh, mesh["replicate"].
        when: gradients are synchronised in "backward", as DDP's hook and FSDP2's do, or when the optimizer makes its
            "step", which works for any module that nobody else synchronises. Default: whichever fits the model.
        team_size: workers per team, instead of `teams`.
        config: settings as one object.
        plan: a file that `spardl plan` has written for this model and as many workers, instead of a method; settings
            that are given beside it count more.
        invitation: of a run with local updates and on_loss="continue" (`sync.company.invitation`): join it as one rank
            more, between two exchanges, instead of meeting the ranks of a process group.
        settings: fields of `SyncConfig`, options of the method, and fields of `LocalUpdates`, on top of these.

    Returns:
        The handle: `stats()`, `state_dict()`, `load_state_dict()`, `detach()`; of local updates also `shared()` and
        `flush()`.

    Raises:
        ConfigError: settings that cannot work.
        ConfigMismatch: two ranks differ in settings or model.
        PeerError: a rank did not come.
    """
    if isinstance(model, nn.Module):  # others are refused below, each way with its own sentence
        check_readable(model)
    if plan is not None:
        update, settings = planned(plan, model, process_group, update, {"config": config, **settings})
        settings.pop("config")
    rule, others = resolve(update, settings)
    if others.get("method") == AUTO and (others.get("encrypt") or (config is not None and config.encrypt)):
        raise ConfigError('method="auto" measures connections that are not encrypted; name a method with encrypt.')
    if process_group is not None and replicate is not None:
        raise ConfigError("replicate and process_group both say which ranks synchronise with each other; give one.")
    where = replicate if replicate is not None else process_group
    given: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler, "team_size": team_size, "config": config}
    chooses = others.get("method") == AUTO
    if chooses:
        del others["method"]
    if rule is not None:
        if when not in (None, "step"):
            raise ConfigError(f'when="{when}" is about gradients; local updates are exchanged after the step.')
        check_for_auto_in_parts(chooses, in_parts=replicate is not None)
        if invitation is not None:
            if chooses or where is not None:
                raise ConfigError(ONLY_SETTINGS)
            return join(model, rule, invitation, **given, **others)
        return attach_locally(model, rule, where, chooses=chooses, **given, **others)
    if invitation is not None:
        raise ConfigError('an invitation is to a run with local updates; give update="local" and on_loss="continue".')
    moment = when_for(model, when, in_parts=replicate is not None)
    in_backward = is_fsdp(_torch_private.uncompiled(model))
    check_for_auto_in_parts(chooses, in_parts=moment == "step" or in_backward)
    if moment == "step":
        return attach_at_step(model, where, **given, **others)
    if in_backward:
        return attach_in_backward(model, where, **given, **others)
    ddp = unwrap(model)
    if chooses:
        return AutoSync(ddp, where, **given, **others)
    if plan is not None and others["method"] == DENSE:  # DDP does that best by itself
        return AutoSync(ddp, where, **given, **others, chooses=False)
    state = SparDLState(ddp, where, **given, **others)
    ddp.register_comm_hook(state, spardl_hook)
    return state


def when_for(model: nn.Module, when: str | None, *, in_parts: bool) -> str:
    """When the gradients of a model are synchronised, if `attach` was told so.

    Raises:
        ConfigError: there is no such time, or not for this model.
    """
    inner = _torch_private.uncompiled(model)
    if when is not None:
        check_choice("when", when, ("backward", "step"))
    if isinstance(inner, DistributedDataParallel):
        if when == "step" or in_parts:
            raise ConfigError("DDP averages gradients in backward; give the module itself to attach, without DDP.")
        return "backward"
    if not isinstance(inner, nn.Module):
        raise ConfigError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    return when or ("step" if in_parts or is_fsdp(inner) else "backward")


def attach_at_step(
    model: nn.Module, process_group: Group, *, optimizer: Given, scaler: torch.amp.GradScaler | None, **given: Any
) -> StepSync:
    """`attach` for gradients that are synchronised when the optimizer steps."""
    optimizers, chosen = settled(process_group, process_group, optimizer, scaler, **given)
    if len(optimizers) != 1:
        raise ConfigError(
            f"{len(optimizers)} optimizers were given, and gradients are synchronised at the step of one; give"
            ' optimizer=..., with parameter groups if they differ, or use update="local", which takes several.'
        )
    check_without_backward(chosen)
    if not (chosen.is_dense or chosen.density == 1.0):
        warn_of_losses(optimizers, stacklevel=4, instead=LOCALLY)
    return StepSync(model, optimizers[0], chosen, scaler=scaler, process_group=process_group)


def attach_in_backward(
    model: nn.Module, process_group: Group, *, optimizer: Given, scaler: torch.amp.GradScaler | None, **given: Any
) -> SyncHandle:
    """`attach` for gradients of FSDP2 that are synchronised in backward."""
    from spardl.integrations.fsdp import BackwardSync  # a second's worth of torch, which this model's owner has paid

    optimizers, chosen = settled(process_group, process_group, optimizer, scaler, **given)
    check_without_backward(chosen)
    forgetful = [each for each in optimizers if has_memory(each)]
    if forgetful and not (chosen.is_dense or chosen.density == 1.0):
        warnings.warn(
            f"FSDP2 hands over gradients without names, so that {type(forgetful[0]).__name__}'s momentum and decay stay"
            " behind the selection: entries that waited arrive without them, and training lags behind dense. Leave"
            f' when="backward" out, and SGD\'s are moved; {LOCALLY}',
            SparDLWarning,
            stacklevel=3,
        )
    return BackwardSync(model, chosen, scaler=scaler, process_group=process_group)


def settled(
    process_group: Group,
    ranks: Group,
    optimizer: Given,
    scaler: torch.amp.GradScaler | None,
    *,
    team_size: int | None,
    config: SyncConfig | None,
    **settings: Any,
) -> tuple[list[Optimizer], SyncConfig]:
    """The optimizers and the settings that `attach` was given, checked; `ranks`: who takes part, by default all.

    Raises:
        ConfigError: something of it cannot work.
    """
    optimizers = optimizers_of(optimizer)
    check_scaler(scaler, optimizers)
    return optimizers, with_teams(configure(config, settings), process_group, team_size, len(member_ranks(ranks)))


def check_without_backward(config: SyncConfig) -> None:
    """Raise `ConfigError` for settings that need DDP's backward."""
    needless = {"merge": config.merge is not None, "clip_norm": config.clip_norm is not None}
    needless["groups"] = config.groups == "bucket"
    for name, is_given in needless.items():
        if is_given:
            instead = "clip gradients as usual, before the optimizer steps" if name == "clip_norm" else "leave it out"
            raise ConfigError(f"{name} is for DDP, whose backward it goes along with; {instead}.")


def check_for_auto_in_parts(chooses: bool, *, in_parts: bool) -> None:
    """Raise `ConfigError` where a choice is asked for that nobody can measure."""
    if chooses and in_parts:
        raise ConfigError(
            'method="auto" measures DDP models, and local updates of whole models; name a method for a model in parts,'
            " and for gradients at the step."
        )


def attach_locally(
    model: nn.Module,
    rule: LocalUpdates,
    process_group: Group,
    *,
    optimizer: Given,
    scaler: torch.amp.GradScaler | None,
    chooses: bool = False,
    **given: Any,
) -> LocalSync:
    """`attach` for local updates; `chooses`: by what method is to be measured."""
    inner = _torch_private.uncompiled(model)
    if not isinstance(inner, nn.Module):
        raise ConfigError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    where = process_group
    if where is None and isinstance(inner, DistributedDataParallel):
        where = inner.process_group
    optimizers, chosen = settled(process_group, where, optimizer, scaler, **given)
    check_beside(chosen)
    if chooses and rule.on_loss == "continue":
        raise ConfigError('on_loss="continue" goes on with settings that need no measurement; name a method.')
    kind = AutoLocalSync if chooses else LocalSync
    return kind(model, optimizers, chosen, rule, scaler=scaler, process_group=where)


def join(
    model: nn.Module,
    rule: LocalUpdates,
    invitation: str,
    *,
    optimizer: Given,
    scaler: torch.amp.GradScaler | None,
    team_size: int | None,
    config: SyncConfig | None,
    **settings: Any,
) -> LocalSync:
    """`attach` for who joins a run of local updates that goes on."""
    if not isinstance(_torch_private.uncompiled(model), nn.Module):
        raise ConfigError(f"attach needs a torch.nn.Module, not {type(model).__name__}.")
    if team_size is not None:
        raise ConfigError(ONLY_SETTINGS)
    optimizers, asked = optimizers_of(optimizer), configure(config, settings)
    check_scaler(scaler, optimizers)
    check_beside(asked)
    return LocalSync(model, optimizers, asked, rule, scaler=scaler, invitation=Invitation.of(invitation))


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
