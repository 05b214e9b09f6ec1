"""A command that many ranks carry out: start them, or be one of them."""

import argparse
import os
import socket
from collections.abc import Callable, Sequence

from spardl.cli.output import check_target
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.train.launchers import LOOPBACK
from spardl.train.place import Place

DEFAULT_WORKERS = 4


def run_on_ranks(
    options: argparse.Namespace, configs: Sequence[SyncConfig], body: Callable[[Place], None], *, patience: float = 0.0
) -> int:
    """Call `body` on every rank, inside a process group; return the exit code.

    Without a launcher this starts the ranks and watches over them. What cannot work is refused before it starts any.
    `patience` is how many seconds they may take to end in good order when they are asked to stop.
    """
    place = Place.from_environment()
    workers = options.workers or (place.workers if place else DEFAULT_WORKERS)
    if place and workers != place.workers:
        raise ConfigError(
            f"--workers {workers} contradicts the launcher's WORLD_SIZE={place.workers}; leave --workers out."
        )
    for config in configs:
        config.resolved_gather(workers)
    check_target(options.json)
    if place is None:
        from spardl.cli.launch import launch

        return launch(options.arguments, workers, options.port, patience)

    _set_defaults(place)
    from spardl.train.rendezvous import process_group
    from spardl.transport.mpi import leave_mpi

    with process_group(place, timeout=min(config.timeout for config in configs)):
        body(place)
    leave_mpi()
    return 0


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
