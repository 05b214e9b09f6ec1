"""Ranks of a benchmark on this machine: one process each, which meet over loopback."""

import os
import socket
import subprocess
from collections.abc import Sequence


def run_ranks(command: Sequence[str], workers: int) -> None:
    """Run `command` once per rank and wait for all; whoever fails ends this program with a sentence."""
    environment = {**os.environ, **meeting_point(workers)}
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(workers)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        failed = next(rank for rank, code in enumerate(codes) if code)
        raise SystemExit(f"rank {failed} of `{' '.join(command)}` failed with exit code {codes[failed]}.")


def meeting_point(workers: int) -> dict[str, str]:
    """What ranks find in their environment; one thread each, for they share the cores."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
