"""Who moves the bytes, by name: connections of our own, torch.distributed or MPI."""

from typing import get_args

import torch
import torch.distributed as dist

from spardl.config import Transport, check_choice
from spardl.errors import ConfigError
from spardl.transport.direct import DirectTransport, best_transport
from spardl.transport.mpi import MPITransport, load_mpi
from spardl.transport.torchdist import Group, TorchTransport, member_ranks


def transport_named(
    name: str, group: Group, *, timeout: float, device: torch.device | str
) -> DirectTransport | TorchTransport | MPITransport:
    """A transport between the ranks of `group`, numbered as there. Collective, as making either kind is."""
    check_choice("transport", name, get_args(Transport))
    if name == "auto":
        return best_transport(group, timeout=timeout, device=device)
    if name == "torch":
        return TorchTransport(group, timeout=timeout, device=device)
    if not dist.is_initialized():
        raise ConfigError("there is no process group; call torch.distributed.init_process_group first.")
    _check_same_ranks()
    return MPITransport(ranks=member_ranks(group), timeout=timeout, device=device)


def _check_same_ranks() -> None:
    """MPI and the process group must count the same processes in the same order."""
    world = load_mpi().COMM_WORLD
    if (world.rank, world.size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"this is rank {dist.get_rank()} of {dist.get_world_size()} in the process group and rank {world.rank} of"
            f" {world.size} for MPI; start all ranks with one mpiexec, and number the process group as MPI does."
        )
