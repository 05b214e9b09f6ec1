"""spardl: data-parallel PyTorch training that sends only the gradient entries that matter.

model = DistributedDataParallel(model)
sync = spardl.attach(model, optimizer=optimizer, density=0.01)
"""

import importlib
from typing import TYPE_CHECKING, Any

from spardl.config import DensitySchedule, SyncConfig
from spardl.errors import ConfigError, ConfigMismatch, PeerError, ProtocolError, SparDLError, SparDLWarning
from spardl.version import __version__

if TYPE_CHECKING:
    from spardl.allreduce import all_reduce
    from spardl.integrations.adam import LocalAdam
    from spardl.integrations.ddp import SparDLState, SyncHandle, attach, spardl_hook
    from spardl.simulation import simulate

# Importing torch takes seconds; a name that needs it brings it in when it is first used.
_LAZY = {
    "all_reduce": "spardl.allreduce",
    "attach": "spardl.integrations.ddp",
    "LocalAdam": "spardl.integrations.adam",
    "SparDLState": "spardl.integrations.ddp",
    "spardl_hook": "spardl.integrations.ddp",
    "SyncHandle": "spardl.integrations.ddp",
    "simulate": "spardl.simulation",
}

__all__ = [
    "ConfigError",
    "ConfigMismatch",
    "DensitySchedule",
    "LocalAdam",
    "PeerError",
    "ProtocolError",
    "SparDLError",
    "SparDLState",
    "SparDLWarning",
    "SyncConfig",
    "SyncHandle",
    "__version__",
    "all_reduce",
    "attach",
    "simulate",
    "spardl_hook",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spardl' has no attribute {name!r}")
