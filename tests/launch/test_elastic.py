"""`torchrun --nnodes 1:2 --max-restarts`: a node is lost, and the other goes on; it comes back, and both do."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import environment

STAGE_S = 100.0  # for each stage, on a busy machine


def agent(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """A node: torchrun with one rank, on this host. Late ones are not waited for for long."""
    launcher = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 9 --monitor-interval 0.2 --rdzv-backend c10d"
    meeting = ["--rdzv-id", "elastic", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    meeting += ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1"]
    train = "spardl train --epochs 100000 --eval-every 0 --save-every 20 --schedule constant --lr 0.01 --resume auto"
    train += " --timeout 10 --checkpoint-dir run"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher.split(), *meeting, "-m", *train.split()],
        env=environment(OMP_NUM_THREADS=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1),
        cwd=folder, stdout=subprocess.DEVNULL, stderr=(folder / "said").open("ab"), start_new_session=True,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return [*found, *(below for child in found for below in children(child))]


def lose(node: "subprocess.Popen[bytes]") -> None:
    """Its power fails: launcher and ranks are gone at once."""
    for pid in [node.pid, *children(node.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


def saved(folder: Path) -> dict[float, int]:
    """The number of workers of every checkpoint that is there, by when it was made."""
    found = {}
    for path in (folder / "run").glob("step-*/meta.json"):
        with contextlib.suppress(OSError, ValueError):
            found[path.stat().st_mtime] = int(json.loads(path.read_text())["identity"]["workers"])
    return found


def until(folder: Path, done: Callable[[str], bool], workers: int) -> None:
    """Return when that many have saved a checkpoint, after they have said what is expected."""
    deadline = time.monotonic() + STAGE_S
    while time.monotonic() < deadline:
        said = (folder / "said").read_text() if (folder / "said").exists() else ""
        there = saved(folder)
        if done(said) and there and there[max(there)] == workers:
            return
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of {workers}; {(folder / 'said').read_text()[-3000:]}")


@contextlib.contextmanager
def nodes(folder: Path, port: int, count: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    started = [agent(folder, port) for _ in range(count)]
    try:
        yield started
    finally:
        for node in started:
            lose(node)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_node_leaves_one_rank_and_one_that_comes_back_makes_them_two_again(tmp_path: Path) -> None:
    """Each time from the last checkpoint, with the same command."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with nodes(tmp_path, port, 1) as running:
        until(tmp_path, lambda said: True, 1)
        running.append(agent(tmp_path, port))
        until(tmp_path, lambda said: "was saved by 1 workers, and here are 2" in said, 2)
        lose(running[-1])
        until(tmp_path, lambda said: "was saved by 2 workers, and here are 1" in said, 1)
        running.append(agent(tmp_path, port))
        until(tmp_path, lambda said: said.count("was saved by 1 workers, and here are 2") == 2, 2)
    assert "Traceback" not in (tmp_path / "said").read_text()
