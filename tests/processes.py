"""Run a function on several real processes over gloo, and get back what each returned."""

import contextlib
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(
    rank: int, workers: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...], folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=workers)
        outcome = ("returned", function(rank, workers, *arguments))
    except BaseException as error:
        outcome = ("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    with contextlib.suppress(Exception):
        if outcome[0] == "returned":
            dist.destroy_process_group()


def on_processes(workers: int, function: Callable[..., Any], *arguments: Any, expect: str = "returned") -> list[Any]:
    """`function(rank, workers, *arguments)` on each rank. A rank that raised fails the test, unless expect="any"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, (workers, port, function, arguments, folder), nprocs=workers, start_method="fork")
        outcomes = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(workers)]
    if expect == "any":
        return outcomes
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "returned", f"rank {rank}: {value}"
    return [value for _, value in outcomes]
