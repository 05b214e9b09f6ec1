"""`torchrun --nnodes 2:3 --max-restarts`: a node is lost, and the others go on; it comes back, and all do."""

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

PATIENCE = 100.0  # seconds for each stage


def agent(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    """A node: torchrun with one rank, on this host. Keep-alives are short, so that a lost one is missed soon."""
    conf = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
    launcher = "--nnodes 2:3 --nproc-per-node 1 --max-restarts 9 --monitor-interval 0.2 --rdzv-backend c10d"
    launcher += f" --rdzv-conf {conf}"
    meeting = ["--rdzv-id", "elastic", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    train = "spardl train --epochs 100000 --eval-every 0 --save-every 20 --schedule constant --resume auto --timeout 5"
    train += " --checkpoint-dir run"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher.split(), *meeting, "-m", *train.split()],
        env=environment(OMP_NUM_THREADS=1), cwd=folder, stdout=subprocess.DEVNULL, stderr=(folder / "said").open("ab"),
        start_new_session=True,
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


def saved(folder: Path) -> list[tuple[int, int]]:
    """Step and number of workers of every checkpoint that is there, in order."""
    found = []
    for path in (folder / "run").rglob("meta.json"):
        if ".partial" not in str(path):
            with contextlib.suppress(OSError, ValueError):
                meta = json.loads(path.read_text())
                found.append((int(meta["step"]), int(meta["identity"]["workers"])))
    return sorted(found)


def until(folder: Path, reached: Callable[[tuple[int, int]], bool]) -> tuple[int, int]:
    """The last checkpoint, as soon as it is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        there = saved(folder)
        if there and reached(there[-1]):
            return there[-1]
        time.sleep(0.1)
    raise AssertionError(f"checkpoints {saved(folder)[-3:]}; {(folder / 'said').read_text()[-3000:]}")


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
def test_a_lost_node_leaves_fewer_ranks_and_one_that_comes_back_makes_them_more_again(tmp_path: Path) -> None:
    """Each time from the last checkpoint, with the same command; no step is made twice, or left out."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with nodes(tmp_path, port, 2) as running:
        until(tmp_path, lambda last: last[1] == 2)
        running.append(agent(tmp_path, port))
        grown, _ = until(tmp_path, lambda last: last[1] == 3)
        lose(running[-1])
        shrunk, _ = until(tmp_path, lambda last: last[0] > grown and last[1] == 2)
        running.append(agent(tmp_path, port))
        again, _ = until(tmp_path, lambda last: last[0] > shrunk and last[1] == 3)
    assert grown < shrunk < again
    said = (tmp_path / "said").read_text()
    assert "was saved by 3 workers, and here are 2" in said and "was saved by 2 workers, and here are 3" in said
