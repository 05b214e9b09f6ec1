"""spardl: data-parallel PyTorch training that sends only the gradient entries that matter.

sync = spardl.attach(model, optimizer=optimizer, update="local", density=0.01)  # any module, any optimizer

model = DistributedDataParallel(model)
sync = spardl.attach(model, optimizer=optimizer, density=0.01)  # gradients, as the papers have it
"""

import importlib
from typing import TYPE_CHECKING, Any

from spardl.collectives.methods.registry import method_names as methods
from spardl.collectives.methods.registry import register as register_method
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import (
    AbsentPeer,
    CheckpointError,
    ConfigError,
    ConfigMismatch,
    DataError,
    LeftBehind,
    PeerError,
    ProtocolError,
    ReplicaError,
    SparDLError,
    SparDLWarning,
    StateError,
    Stopped,
)
from spardl.update import LocalUpdates
from spardl.version import __version__

if TYPE_CHECKING:
    from spardl.allreduce import all_reduce, forget, stats_of
    from spardl.integrations.attach import attach
    from spardl.integrations.ddp import SparDLState, spardl_hook
    from spardl.integrations.handle import SyncHandle
    from spardl.integrations.local import LocalSync
    from spardl.simulator.simulation import simulate
    from spardl.sync.session import Session

# Importing torch takes seconds; a name that needs it brings it in when it is first used.
_LAZY = {
    "all_reduce": "spardl.allreduce",
    "attach": "spardl.integrations.attach",
    "forget": "spardl.allreduce",
    "LocalSync": "spardl.integrations.local",
    "Session": "spardl.sync.session",
    "SparDLState": "spardl.integrations.ddp",
    "spardl_hook": "spardl.integrations.ddp",
    "stats_of": "spardl.allreduce",
    "SyncHandle": "spardl.integrations.handle",
    "simulate": "spardl.simulator.simulation",
}

__all__ = [
    "AbsentPeer",
    "CheckpointError",
    "ConfigError",
    "ConfigMismatch",
    "DataError",
    "DensitySchedule",
    "LeftBehind",
    "LocalSync",
    "LocalUpdates",
    "PeerError",
    "ProtocolError",
    "ReplicaError",
    "Session",
    "SparDLError",
    "SparDLState",
    "SparDLWarning",
    "StateError",
    "Stopped",
    "SyncConfig",
    "SyncHandle",
    "__version__",
    "all_reduce",
    "attach",
    "forget",
    "methods",
    "register_method",
    "simulate",
    "spardl_hook",
    "stats_of",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spardl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
