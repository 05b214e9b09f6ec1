"""The launcher ends what it started: all ranks, whoever fails and however it ends itself."""

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import environment, spardl, start

ENDLESS = ("train", "--workers", 2, "--epochs", 100_000, "--timeout", 600)

# What bounds a hang here: on a slow machine less, but far from a peer's timeout.
SECONDS = 60


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(entry.partition(b"=")[2]) for entry in variables if entry.startswith(b"RANK="))


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """A training that has begun: its launcher, and the process of each rank."""
    with start(*ENDLESS) as launcher:
        try:
            assert launcher.stderr is not None
            first = launcher.stderr.readline()
            assert "epoch 1/" in first, first
            ranks = {rank_of(pid): pid for pid in children(launcher.pid)}
            assert sorted(ranks) == [0, 1]
            yield launcher, ranks
        finally:
            launcher.kill()


def wait_for_end(pids: list[int]) -> None:
    """Return when all these processes have ended; fails after some seconds."""
    for descriptor in [_watch(pid) for pid in pids]:
        if descriptor is not None:
            ended, _, _ = select.select([descriptor], [], [], SECONDS)
            os.close(descriptor)
            assert ended, "a worker was left behind"


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow  # test_attack.py kills ranks too
def test_a_killed_rank_ends_the_run_and_is_named_once() -> None:
    """The others do not wait for their timeout, and none of them adds its own complaint."""
    with running() as (launcher, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, err = launcher.communicate(timeout=SECONDS)
        complaints = [line for line in err.splitlines() if "epoch" not in line]
        assert complaints == ["spardl: rank 1 was killed by SIGKILL."]
        assert launcher.returncode == 1
        wait_for_end(list(ranks.values()))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_launcher_that_is_asked_to_stop_takes_its_workers_along(number: signal.Signals) -> None:
    """Ctrl-C and a polite kill leave no process behind, and no traceback, however often it is asked."""
    with running() as (launcher, ranks):
        for _ in range(5):
            launcher.send_signal(number)
            time.sleep(0.005)
        _, err = launcher.communicate(timeout=SECONDS)
        assert [line for line in err.splitlines() if "epoch" not in line] == [f"spardl: stopped by {number.name}."]
        assert launcher.returncode == 128 + number
        wait_for_end(list(ranks.values()))


@pytest.mark.slow  # the next one kills it too
def test_workers_do_not_outlive_a_launcher_that_was_killed() -> None:
    """Even a launcher that could not clean up leaves nothing running."""
    with running() as (launcher, ranks):
        launcher.kill()
        wait_for_end(list(ranks.values()))


@pytest.mark.slow  # starts a launcher and its ranks
def test_a_stopped_worker_does_not_outlive_its_launcher_either() -> None:
    """It can notice nothing, so the system ends it."""
    with running() as (launcher, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        launcher.kill()
        wait_for_end(list(ranks.values()))


@pytest.mark.slow  # cli/test_failures.py has one that every rank refuses
def test_what_every_rank_refuses_is_said_once() -> None:
    """Every rank finds that the batches are too large; the user reads it once."""
    done = spardl("train", "--workers", 2, "--batch-size", 1000)
    assert done.returncode == 2
    assert done.stderr.count("do not fill one step") == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_rank_that_never_comes_is_named() -> None:
    """Rank 0 waits as long as --timeout says, and then knows who is missing."""
    env = environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    done = spardl("bench", "--timeout", 1, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("spardl: rank 1 of 2 never came")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_rank_zero_is_named() -> None:
    """Who cannot reach the meeting point says so, without a page of socket errors."""
    env = environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    done = spardl("bench", "--timeout", 1, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("spardl: rank 0 never came")
    assert len(done.stderr.splitlines()) == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
