"""`attach`: one line on a model."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from spardl.config import SyncConfig
from spardl.integrations.ddp import SparDLState, spardl_hook
from spardl.integrations.model import unwrap
from spardl.integrations.optim.choice import Given
from spardl.transport.torchdist import Group


def attach(
    model: DistributedDataParallel,
    *,
    optimizer: Given = None,
    scaler: torch.amp.GradScaler | None = None,
    process_group: Group = None,
    team_size: int | None = None,
    config: SyncConfig | None = None,
    **settings: Any,
) -> SparDLState:
    """Synchronise this model's gradients sparsely from now on. Collective: every rank calls it, once, in the same way.

    Args:
        model: wrapped in DistributedDataParallel, compiled or not.
        optimizer: what steps this model, or a list of several. Momentum and weight decay of an SGD move before the
            selection, where they belong; False says that there is none to move.
        scaler: the GradScaler in use, so that residuals are kept in unscaled units.
        process_group: a group or a DeviceMesh (two dimensions: teams x members); default: DDP's own ranks.
        team_size: workers per team, instead of `teams`.
        config: settings as one object.
        settings: fields of `SyncConfig` and options of the method, instead of or on top of `config`.

    Returns:
        The handle: `stats()`, `state_dict()`, `load_state_dict()`, `detach()`.

    Raises:
        ConfigError: settings that cannot work.
        ConfigMismatch: two ranks differ in settings or model.
        PeerError: a rank did not come.
    """
    given: dict[str, Any] = {"optimizer": optimizer, "scaler": scaler, "team_size": team_size, "config": config}
    state = SparDLState(model, process_group, **given, **settings)
    unwrap(model).register_comm_hook(state, spardl_hook)
    return state
