"""To be one rank of a run, whoever started it."""

import os
import socket
from collections.abc import Callable

from spardl.launch.launchers import LOOPBACK
from spardl.launch.place import Place


def run_rank(place: Place, timeout: float, body: Callable[[Place], None]) -> None:
    """Call `body` inside a process group of all ranks of the run. Call it before torch is imported.

    A rank that does not come within `timeout` seconds is named in the error that all others raise.
    """
    _set_defaults(place)
    from spardl.launch.rendezvous import process_group
    from spardl.transport.mpi import leave_mpi

    with process_group(place, timeout):
        body(place)
    leave_mpi()


def _set_defaults(place: Place) -> None:
    """What our own launcher sets and others leave open. Before torch is imported, which reads some of it."""
    # c10d logs at length what it then raises as an error, which we turn into a sentence.
    defaults = {"TORCH_CPP_LOG_LEVEL": "FATAL", "MASTER_ADDR": place.host}
    if place.host == LOOPBACK and place.workers > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # ranks that share a machine
        if any(name == "lo" for _, name in socket.if_nameindex()):
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
