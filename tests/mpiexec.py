"""Run a test module's function on ranks that mpiexec has started, and get back what each returned.

Run as a program, this file is such a rank.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from commands import environment

TESTS = Path(__file__).parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def why_no_mpi() -> str | None:
    """What keeps MPI's tests from running here, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if not MPIEXEC.exists():
        return f"there is no mpiexec beside {sys.executable} (pip install mpich brings one)"
    return None


def on_mpi(workers: int, function: Callable[..., Any], *arguments: Any, timeout: float = 100.0) -> list[Any]:
    """`function(rank, workers, *arguments)` on each rank; what each returned, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, Path(folder) / "arguments.pt")
        program = [sys.executable, __file__, function.__code__.co_filename, function.__name__, folder]
        path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [str(MPIEXEC), "-n", str(workers), *program],
            env=environment(OMP_NUM_THREADS=1, PYTHONPATH=os.pathsep.join(path)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(workers)]


def _be_a_rank(path: str, name: str, folder: str) -> None:
    spec = importlib.util.spec_from_file_location("functions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = torch.load(Path(folder) / "arguments.pt", weights_only=False)
    rank, workers = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    torch.save(getattr(module, name)(rank, workers, *arguments), Path(folder) / f"{rank}.pt")


if __name__ == "__main__":
    try:
        _be_a_rank(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without MPI's farewell, so that mpiexec ends the others
