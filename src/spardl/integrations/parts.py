"""Parts: what of a sharded model lies on this rank, and who holds the rest.

A DTensor's part is an ordinary tensor. Ranks that hold the same part of different replicas synchronise it as they would
a whole model; only what concerns all parts (`Fellows`) is agreed on between the ranks of one replica.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spardl.errors import ConfigError
from spardl.transport.members import Group, member_ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# Who cuts models up without a word of what lies where: each rank would take its part for the whole. By name, since none
# of them is ours to import.
UNREADABLE = {
    "FullyShardedDataParallel": "FSDP1 keeps flat parts that do not tell what they are parts of",
    "DeepSpeedEngine": "DeepSpeed cuts up and synchronises by itself what it trains",
}


def is_sharded(tensor: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor. Nothing is before somebody imports them, which takes a second: we do not."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp(module: object) -> "TypeGuard[FSDPModule]":
    """Whether `fully_shard` was called on it; likewise without an import."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def check_readable(model: nn.Module) -> None:
    """Raise `ConfigError` for a model whose parts nobody can tell from whole parameters."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    for name in sorted(kinds & UNREADABLE.keys()):
        raise ConfigError(
            f"this model has a {name}, and {UNREADABLE[name]}; use DDP or a plain module, or, where a device is too"
            ' small for it, fully_shard (FSDP2) within machines and attach(..., replicate=mesh["replicate"]).'
        )


def part_of(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank, in the same memory: of a DTensor its local part, else the tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def placed_like(part: Tensor, whole: Tensor) -> Tensor:
    """A tensor of which this rank holds this part, laid out as `whole` is."""
    if not is_sharded(whole):
        return part
    where = whole.device_mesh, whole.placements
    return type(whole).from_local(part, *where, run_check=False, shape=whole.shape, stride=whole.stride())


def kind_of(parameter: Tensor) -> str:
    """The dimensions over which a parameter is cut up.

    Ranks along the others hold the same values, and must go on doing so: they select the same entries only if nothing
    that is theirs alone competes with these. So parameters are grouped with others of their kind.
    """
    if not is_sharded(parameter):
        return "whole"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    cut = [not each.is_replicate() and mesh.size(index) > 1 for index, each in enumerate(parameter.placements)]
    return " x ".join(name for name, is_cut in zip(names, cut, strict=True) if is_cut) or "whole"


def mesh_of(parameters: Mapping[str, Tensor], replicas: Group) -> DeviceMesh | None:
    """The ranks that hold parts of this replica of a model; None if this rank holds all of it.

    Args:
        parameters: of the model.
        replicas: the ranks that hold the same parts of other replicas.

    Raises:
        ConfigError: nothing says who these are, or they hold parts of this replica.
    """
    sharded = {name: each for name, each in parameters.items() if is_sharded(each)}
    if not sharded:
        return None
    widest = max((each.device_mesh for each in sharded.values()), key=lambda mesh: mesh.size())
    own = member_ranks(widest)
    if replicas is None:
        raise ConfigError(
            f"this model lies in parts on ranks {own}; say which ranks hold the same part of other replicas:"
            ' attach(..., replicate=mesh["replicate"]).'
        )
    for name, each in sharded.items():
        ranks = member_ranks(each.device_mesh)
        if not set(ranks) <= set(own):
            raise ConfigError(
                f"{name!r} lies on ranks {ranks}, which are not all among {own}; give all parameters meshes within one."
            )
        if any(placement.is_partial() for placement in each.placements):
            raise ConfigError(f"{name!r} is a sum that nobody has added up yet (Partial); redistribute it first.")
    both = sorted((set(own) & set(member_ranks(replicas))) - {dist.get_rank()})
    if both:
        raise ConfigError(
            f"ranks {own} hold this replica of the model, and {both} of them cannot be other replicas too. A model on a"
            " mesh of two dimensions (HSDP) averages densely over both before anybody is asked: call fully_shard with"
            ' mesh["shard"] alone, and attach with replicate=mesh["replicate"].'
        )
    return widest if widest.size() > 1 else None


def gather_anew(model: nn.Module) -> None:
    """Parts have been written to: what FSDP may have gathered of them before is out of date."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()
