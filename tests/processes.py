"""Run a function on several real processes over gloo, and get back what each returned."""

import contextlib
import functools
import importlib
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from spardl import _torch_private, kernels

HOST = "127.0.0.1"


def on_processes(
    workers: int, function: Callable[..., Any], *arguments: Any, expect: str = "returned", timeout: float = 100.0
) -> list[Any]:
    """`function(rank, workers, *arguments)` on each rank; what each returned, in rank order.

    A rank that raised or died fails the test. With expect="any", each rank gives a pair instead: ("returned", value),
    ("raised", text) or ("died", None).
    """
    import_once()
    with socket.create_server((HOST, 0), backlog=1024) as listener, tempfile.TemporaryDirectory() as folder:
        started = mp.start_processes(
            _enter, (workers, listener, function, arguments, folder), nprocs=workers, join=False, start_method="fork"
        )
        listener.close()
        join(started, timeout, together=expect == "returned")
        outcomes = [_outcome(Path(folder) / f"{rank}.pt") for rank in range(workers)]
    if expect == "any":
        return outcomes
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "returned", f"rank {rank} {kind}: {value}"
    return [value for _, value in outcomes]


def _enter(
    rank: int,
    workers: int,
    listener: socket.socket,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: str,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=_store(rank, listener), rank=rank, world_size=workers)
        outcome = ("returned", function(rank, workers, *arguments))
    except BaseException as error:
        outcome = ("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    with contextlib.suppress(Exception):
        if outcome[0] == "returned":
            kept = _torch_private.gloo_behind(dist.group.WORLD)
            dist.destroy_process_group()
            del kept


def _store(rank: int, listener: socket.socket) -> TCPStore:
    """Rank 0 keeps it, at a socket that has listened since before there were ranks: nobody else can take the port."""
    port, uv = listener.getsockname()[1], os.environ.get("USE_LIBUV", "1") == "1"  # as torch's own rendezvous has it
    if rank == 0:
        taken = listener.detach()
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=taken, use_libuv=uv)
    listener.close()
    return TCPStore(HOST, port, is_master=False, use_libuv=uv)


def _outcome(path: Path) -> tuple[str, Any]:
    return torch.load(path, weights_only=False) if path.exists() else ("died", None)


def join(started: Any, timeout: float, *, together: bool = True) -> None:
    """Wait for all of them, and leave none behind. `together`: one that is killed ends the others."""
    deadline = time.monotonic() + timeout
    try:
        for process in [] if together else started.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        while together and not started.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"the processes were not done after {timeout:g} s"
        assert not any(process.is_alive() for process in started.processes), f"not done after {timeout:g} s"
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
            process.join()


@functools.cache
def import_once() -> None:
    """What every process would import for itself is imported before they part: wrapping a model in DDP alone takes
    seconds, for the compiler that it brings in."""
    importlib.import_module("torch._dynamo")
    kernels.for_device(torch.device("cpu"))
    kernels.load(
        "spardl.transport.direct.exchange"
    )  # compiling takes longer than some tests let ranks wait for each other
