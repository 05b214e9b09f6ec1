"""Run `spardl` as a user does: in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes: object) -> dict[str, str]:
    """Ours, without what a launcher may have left in it."""
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {**clean, **{name: str(value) for name, value in changes.items()}}


def start(*arguments: object, env: Mapping[str, str] | None = None, module: str = "spardl") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *(str(argument) for argument in arguments)],
        env=environment() if env is None else env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def spardl(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    with start(*arguments, env=env) as process:
        out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def json_lines(text: str) -> list[dict[str, Any]]:
    """Every line must be a record: whatever else is on standard output is an error here."""
    return [json.loads(line) for line in text.splitlines()]
