"""Who moves the bytes, by name: connections of our own, torch.distributed or MPI."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from spardl.choices import check_choice
from spardl.config import TRANSPORTS
from spardl.errors import ConfigError, SparDLWarning
from spardl.transport.base import Transport
from spardl.transport.direct import DirectTransport, Unreachable
from spardl.transport.direct.secure import Key
from spardl.transport.members import Group, member_ranks
from spardl.transport.mpi import MPITransport, load_mpi
from spardl.transport.torchdist import TorchTransport

Device = torch.device | str


def transport_named(
    name: str, group: Group, *, timeout: float, device: Device, encrypt: str | None = None
) -> Transport:
    """A transport between the ranks of `group`, numbered as there. Collective, as making any of them is.

    `encrypt` is a file with the key and certificate that all ranks have: everything is encrypted then, or refused.
    """
    check_choice("transport", name, TRANSPORTS)
    if encrypt is not None:
        return own_transport(name, group, timeout=timeout, device=device, encrypt=encrypt)
    return _MAKERS[name](group, timeout, device)


def best_transport(group: Group = None, *, timeout: float, device: Device = "cpu") -> Transport:
    """Direct connections on CPU where all ranks can reach each other, torch.distributed elsewhere. Collective."""
    inner = TorchTransport(group, timeout=timeout, device=device)
    if inner.device.type != "cpu" or inner.workers == 1:
        return inner
    try:
        return DirectTransport(group, timeout=timeout, device=device, inner=inner)
    except Unreachable as error:
        warnings.warn(
            f"Ranks cannot connect to each other directly: {error} Messages go through gloo instead, which takes"
            " longer over small ones; let TCP connections through between the hosts, or set GLOO_SOCKET_IFNAME to the"
            " interface that connects them.",
            SparDLWarning,
            stacklevel=2,
        )
        return inner


def own_transport(
    name: str, group: Group, *, timeout: float, device: Device, encrypt: str | None = None
) -> DirectTransport:
    """A transport that does everything over connections of our own: they can be encrypted, and those who are left can
    form it anew when ranks are lost. Collective.

    Raises:
        ConfigError: there is none between these ranks, or `encrypt` names no key.
    """
    if name != "auto" or torch.device(device).type != "cpu":
        raise ConfigError(
            f'encrypt=... and on_loss="continue" need connections of our own between CPUs, not {name} on {device}.'
        )
    key = None if encrypt is None else Key(encrypt)
    try:
        return DirectTransport(group, timeout=timeout, device=device, alone=True, key=key)
    except Unreachable as error:
        raise ConfigError(f"ranks must be able to connect to each other here: {error}") from error


def _best(group: Group, timeout: float, device: Device) -> Transport:
    return best_transport(group, timeout=timeout, device=device)


def _torch(group: Group, timeout: float, device: Device) -> Transport:
    return TorchTransport(group, timeout=timeout, device=device)


def _mpi(group: Group, timeout: float, device: Device) -> Transport:
    if not dist.is_initialized():
        raise ConfigError("there is no process group; call torch.distributed.init_process_group first.")
    _check_same_ranks()
    return MPITransport(ranks=member_ranks(group), timeout=timeout, device=device)


_MAKERS: dict[str, Callable[[Group, float, Device], Transport]] = {"auto": _best, "torch": _torch, "mpi": _mpi}


def _check_same_ranks() -> None:
    """MPI and the process group must count the same processes in the same order."""
    world = load_mpi().COMM_WORLD
    if (world.rank, world.size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"this is rank {dist.get_rank()} of {dist.get_world_size()} in the process group and rank {world.rank} of"
            f" {world.size} for MPI; start all ranks with one mpiexec, and number the process group as MPI does."
        )
