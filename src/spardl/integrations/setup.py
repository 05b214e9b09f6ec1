"""What a user gives to `attach`, checked and resolved before anything is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spardl.config import SyncConfig, configure
from spardl.errors import ConfigError
from spardl.integrations.model import unwrap
from spardl.integrations.optim.choice import Given, optimizers_of, warn_of_losses
from spardl.transport.members import Group, member_ranks


@dataclass(frozen=True)
class Setup:
    """A DDP model, who synchronises it and how.

    scaler  the GradScaler in use, if it is enabled
    quiet   say nothing of optimizers that act behind the selection: there are none, or nothing waits there
    """

    model: DistributedDataParallel
    process_group: Group
    config: SyncConfig
    optimizers: Sequence[Optimizer]
    scaler: torch.amp.GradScaler | None
    quiet: bool

    @classmethod
    def of(
        cls,
        model: object,
        process_group: Group = None,
        *,
        optimizer: Given = None,
        scaler: torch.amp.GradScaler | None = None,
        team_size: int | None = None,
        config: SyncConfig | None = None,
        hooked: bool = False,
        **settings: Any,
    ) -> "Setup":
        """Arguments as in `attach`; `hooked`: the hook that the model has already is ours.

        Raises `ConfigError` for what cannot work.
        """
        ddp, optimizers = unwrap(model, hooked=hooked), optimizers_of(optimizer)
        where = process_group if process_group is not None else ddp.process_group
        chosen = with_teams(configure(config, settings), process_group, team_size, len(member_ranks(where)))
        check_scaler(scaler, optimizers)
        quiet = optimizer is False or chosen.is_dense or chosen.density == 1.0
        if not quiet:
            warn_of_losses(optimizers, stacklevel=5)
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        return cls(ddp, where, chosen, optimizers, enabled, quiet)


def with_teams(config: SyncConfig, group: Group, team_size: int | None, workers: int) -> SyncConfig:
    """Teams may also be given as a size, or as the first dimension of a mesh."""
    teams = getattr(config.options, "teams", None)
    if team_size is not None:
        if teams is None:
            raise ConfigError(f"{config.method} has no teams; leave team_size out.")
        if teams != "auto":
            raise ConfigError(f"give teams={teams} or team_size={team_size}, not both.")
        if team_size < 1 or workers % team_size:
            raise ConfigError(f"{workers} workers cannot form teams of {team_size}; choose a divisor of {workers}.")
        return configure(config, {"teams": workers // team_size})
    if group is not None and not isinstance(group, dist.ProcessGroup) and group.ndim == 2 and teams == "auto":
        return configure(config, {"teams": group.size(0)})
    return config


def check_scaler(scaler: object, optimizers: Sequence[Optimizer]) -> None:
    if scaler is None:
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(
            f"scaler={type(scaler).__name__} is not a torch.amp.GradScaler; leave it out if there is none."
        )
