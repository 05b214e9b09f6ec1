"""A model in two parts on a mesh of 2 x 2 processes, for tests of what lies in parts."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from spardl.integrations.parts import part_of
from training import mlp

WORKERS = 4  # two replicas of a model in two parts
needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of torch 2.6 does not run on a CPU"
)
HOOKED = hasattr(FSDPModule, "set_all_reduce_hook")  # torch 2.6 has no hook inside backward


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh, model=None, **settings):
    """Each layer by itself, and the rest with the root. Of an odd number of rows the first part has one more."""
    model = mlp() if model is None else model
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def parts(model):
    """This rank's parts of all parameters in one vector."""
    return torch.cat([part_of(each).detach().float().flatten() for each in model.parameters()])


def whole(model):
    """All parameters, gathered from all parts, in one vector. Collective."""
    return torch.cat([each.full_tensor().detach().float().flatten() for each in model.parameters()])
