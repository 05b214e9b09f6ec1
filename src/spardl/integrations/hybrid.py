"""FSDP2 under Accelerate and the Hugging Face Trainer: dense within a replica, sparse between replicas.

    args = TrainingArguments(fsdp=True, parallelism_config=SparseReplicas(dp_replicate_size=2, dp_shard_size=4), ...)

Accelerate hands both dimensions of its mesh to `fully_shard`, whose dense average over both comes before anybody else
is asked. A `SparseReplicas` hands over the second alone, and leaves the first to spardl.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spardl import _torch_private
from spardl.errors import ConfigError
from spardl.extras import require
from spardl.integrations.parts import is_fsdp

require("accelerate", "spardl.integrations.hybrid needs Accelerate")

import accelerate  # noqa: E402

if not hasattr(accelerate, "ParallelismConfig"):
    raise ConfigError(
        f"Accelerate {accelerate.__version__} has no ParallelismConfig, which says how replicas lie; take a newer one,"
        " or a loop of your own with fully_shard and spardl.attach(..., replicate=...)."
    )

REPLICATE = "dp_replicate"  # Accelerate's name for the dimension


class SparseReplicas(accelerate.ParallelismConfig):
    """Accelerate's `ParallelismConfig`, with replicas that nobody averages densely.

    Data are dealt out over all of `dp_replicate_size` x `dp_shard_size` processes, as always. FSDP2 shards and averages
    within each replica; whoever is attached with `replicas_of`, as `SparseSyncCallback` is, averages between them. With
    nobody attached replicas train apart.
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that `fully_shard` is given."""
        return [name for name in super().fsdp_dim_names if name != REPLICATE]


def replicas_of(accelerator: Any, model: nn.Module) -> DeviceMesh | None:
    """The ranks that hold the same part of other replicas of a prepared model; None if it does not lie in parts.

    Raises:
        ConfigError: there are no replicas, or FSDP2 averages between them itself.
    """
    if not is_fsdp(_torch_private.uncompiled(model)):
        return None
    config = getattr(accelerator, "parallelism_config", None)
    if isinstance(config, SparseReplicas) and config.dp_replicate_enabled:
        mesh: DeviceMesh = accelerator.torch_device_mesh[REPLICATE]
        return mesh
    if config is not None and config.dp_replicate_enabled:
        sizes = f"dp_replicate_size={config.dp_replicate_size}, dp_shard_size={config.dp_shard_size}"
        raise ConfigError(
            "FSDP2 averages densely over both dimensions of this mesh before spardl is asked; give"
            f" parallelism_config=spardl.integrations.hybrid.SparseReplicas({sizes}), which keeps it within a replica."
        )
    workers = accelerator.num_processes
    raise ConfigError(
        f"FSDP2 has cut this model up over all {workers} processes, so that there are no replicas to synchronise; give"
        " parallelism_config=spardl.integrations.hybrid.SparseReplicas(dp_replicate_size=machines,"
        f" dp_shard_size=processes of each), {workers} in all, or use DDP."
    )
