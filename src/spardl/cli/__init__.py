"""The command line. torch is imported inside the commands: `spardl --help` answers at once."""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from spardl.cli.commands import parse
from spardl.errors import (
    AbsentPeer,
    CheckpointError,
    ConfigError,
    ConfigMismatch,
    DataError,
    PeerError,
    SparDLError,
    Stopped,
)
from spardl.launch.lifeline import Failure, Lifeline


def main() -> NoReturn:
    """The program `spardl`."""
    code = execute(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not through the interpreter's end: DDP keeps gloo's threads alive, and one that drops the last reference to a
    # tensor meanwhile aborts the process, after all the work was done.
    os._exit(code)


def execute(arguments: Sequence[str]) -> int:
    """Run one command; return 0, 2 for input that cannot work, 1 for what went wrong later, 128 + signal if stopped.

    What went wrong is one sentence on standard error, or goes up the lifeline to the launcher, which shows it once.
    """
    lifeline = Lifeline.from_environment()
    try:
        options = parse(arguments)
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Stopped as stop:
        # All ranks stop together: under a launcher of others, the first one says so for all.
        failure = Failure(str(stop), 128 + stop.signal, echo=True)
        if lifeline is None and os.environ.get("RANK", "0") != "0":
            return failure.code
    except SparDLError as error:
        failure = Failure(_one_line(error), _exit_code(error), echo=isinstance(error, PeerError))
    except Exception:
        text = traceback.format_exc().rstrip()
        failure = Failure(
            f"rank {os.environ['RANK']} failed.\n{text}" if lifeline else f"this should not happen.\n{text}"
        )
    if lifeline is not None:
        lifeline.report(failure)
    else:
        print(f"spardl: {failure.text}", file=sys.stderr)
    return failure.code


def _exit_code(error: SparDLError) -> int:
    """2 where what was given cannot work: settings, files, or ranks that were never started."""
    if isinstance(error, CheckpointError):
        return 1 if error.writing else 2
    return 2 if isinstance(error, ConfigError | ConfigMismatch | DataError | AbsentPeer) else 1


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
