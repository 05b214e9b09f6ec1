"""A command that many ranks carry out: start them, or be one of them."""

import argparse
import sys
from collections.abc import Callable, Sequence

from spardl.cli.output import check_target
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.launch.place import Place

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
        config.check_for(workers)
    check_target(options.json)
    if place is None:
        from spardl.launch.local import launch

        command = [sys.executable, "-P", "-m", "spardl", *options.arguments]
        return launch(command, workers, _say, port=options.port, patience=patience)
    from spardl.launch.rank import run_rank

    run_rank(place, min(config.timeout for config in configs), body)
    return 0


def _say(sentence: str) -> None:
    """What the launcher has to say, on standard error."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r\x1b[K")  # a progress bar that was cut off leaves the cursor hidden
    print(f"spardl: {sentence}", file=sys.stderr, flush=True)
