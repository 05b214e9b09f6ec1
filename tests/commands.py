"""Run `spardl` as a user does: in a process of its own."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spardl import kernels

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# torch 2.6 says so of its own code when Python 3.13 imports it; tests look for what we say on standard error.
TORCHS_OWN = "ignore:functools.partial will be a method descriptor:FutureWarning"


def environment(**changes: object) -> dict[str, str]:
    """Ours, without what a launcher may have left in it, and without a warning of torch's about itself."""
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    filters = ",".join(filter(None, [clean.get("PYTHONWARNINGS"), TORCHS_OWN]))
    return {**clean, "PYTHONWARNINGS": filters, **{name: str(value) for name, value in changes.items()}}


def start(
    *arguments: object, env: Mapping[str, str] | None = None, module: str = "spardl", cwd: Path | None = None
) -> subprocess.Popen[str]:
    _compile_once()
    return subprocess.Popen(
        [sys.executable, "-m", module, *(str(argument) for argument in arguments)],
        env=environment() if env is None else env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def spardl(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Wait for it; `how` as for `start`."""
    with start(*arguments, **how) as process:
        out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@functools.cache
def _compile_once() -> None:
    """A command that has to compile says so on standard error, which is not what tests look for there."""
    kernels.for_device(torch.device("cpu"))
    kernels.load("spardl.transport.direct.exchange")


def json_lines(text: str) -> list[dict[str, Any]]:
    """Every line must be a record: whatever else is on standard output is an error here."""
    return [json.loads(line) for line in text.splitlines()]
