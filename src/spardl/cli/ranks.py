"""A command that many ranks carry out: start them, or be one of them."""

import argparse
import os
from collections.abc import Callable, Sequence

from spardl.cli.output import check_target
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.train.place import Place

DEFAULT_WORKERS = 4


def run_on_ranks(options: argparse.Namespace, configs: Sequence[SyncConfig], body: Callable[[Place], None]) -> int:
    """Call `body` on every rank, inside a process group; return the exit code.

    Without a launcher this starts the ranks and watches over them. What cannot work is refused before it starts any.
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

        return launch(options.arguments, workers, options.port)

    # c10d logs at length what it then raises as an error, which we turn into a sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from spardl.train.rendezvous import process_group

    with process_group(place, timeout=min(config.timeout for config in configs)):
        body(place)
    return 0
