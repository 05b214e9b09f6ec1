"""Run what a launcher would start in processes forked from this one: starting torch anew takes most of the time."""

import contextlib
import io
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.multiprocessing as mp

from processes import HOST, import_once, join, on_processes
from spardl.cli import execute
from spardl.launch.place import LISTENER

KINDS = ("code", "out", "err")  # what each rank leaves behind


def run_forked(script: Path, workers: int, *options: object) -> str:
    """A script as torchrun runs it; what rank 0 printed. What it imports should have been imported before."""
    printed: str = on_processes(workers, _run, script, [str(option) for option in options])[0]
    return printed


def _run(rank: int, workers: int, script: Path, options: list[str]) -> str:
    """The process group is there already, so the script's own calls that make and end one do nothing."""
    out = io.StringIO()
    met = (torch.distributed.HashStore(), rank, workers)
    with contextlib.redirect_stdout(out), contextlib.ExitStack() as stack:
        for name in ("init", "destroy"):
            stack.enter_context(mock.patch(f"torch.distributed.{name}_process_group"))
        stack.enter_context(mock.patch("torch.distributed.rendezvous", lambda _: iter([met])))
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *options]))
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def module_forked(name: str, *options: object, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """`python -m name`, alone: what it wrote, and its exit code. What it imports should have been imported before."""
    import_once()
    command = [name, *(str(option) for option in options)]
    with tempfile.TemporaryDirectory() as folder:
        given = (command, Path(folder))
        join(mp.start_processes(_run_module, given, nprocs=1, join=False, start_method="fork"), timeout=timeout)
        code, out, err = ((Path(folder) / f"0.{kind}").read_text() for kind in KINDS)
    return subprocess.CompletedProcess(command, int(code), out, err)


def _run_module(rank: int, command: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    code: object = 0
    with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
        sys.stdout, sys.stderr, sys.argv = out, err, command
        try:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
    (folder / f"{rank}.code").write_text(str(code or 0))
    os._exit(0)  # DDP keeps gloo's threads alive


def spardl_forked(workers: int, *arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """`spardl` as ranks of our own launcher: what they wrote, in rank order, and the highest exit code."""
    import_once()
    command = [str(argument) for argument in arguments]
    with socket.create_server((HOST, 0), backlog=1024) as listener, tempfile.TemporaryDirectory() as folder:
        given = (workers, listener, command, variables, Path(folder))
        started = mp.start_processes(_execute, given, nprocs=workers, join=False, start_method="fork")
        listener.close()
        join(started, timeout=100)
        left = {kind: [(Path(folder) / f"{rank}.{kind}").read_text() for rank in range(workers)] for kind in KINDS}
    return subprocess.CompletedProcess(command, max(map(int, left["code"])), "".join(left["out"]), "".join(left["err"]))


def _execute(
    rank: int, workers: int, listener: socket.socket, command: list[str], variables: dict[str, object], folder: Path
) -> None:
    torch.set_num_threads(1)
    host, port = listener.getsockname()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": host, "MASTER_PORT": port}
    if rank == 0:
        place[LISTENER] = listener.fileno()
    os.environ.update({name: str(value) for name, value in {**place, **variables}.items()})
    with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
        sys.stdout, sys.stderr = out, err
        code = execute(command)
    (folder / f"{rank}.code").write_text(str(code))
    os._exit(0)  # as `spardl` itself ends: DDP keeps gloo's threads alive
