"""Run a script as torchrun would, in processes forked from this one: starting torch anew takes most of the time."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

from processes import on_processes


def run_forked(script: Path, workers: int, *options: object) -> str:
    """What rank 0 of it printed. Whatever the script imports should have been imported before."""
    printed: str = on_processes(workers, _run, script, [str(option) for option in options])[0]
    return printed


def _run(rank: int, workers: int, script: Path, options: list[str]) -> str:
    """The process group is there already, so the script's own calls that make and end one do nothing."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.ExitStack() as stack:
        for name in ("init", "destroy"):
            stack.enter_context(mock.patch(f"torch.distributed.{name}_process_group"))
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *options]))
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()
