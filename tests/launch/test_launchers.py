"""The same command is a rank under mpiexec and srun, on one host and on several. (torchrun: test_records.py.)"""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from commands import environment, start
from mpiexec import MPIEXEC, why_no_mpi

# What its fixtures start is started once, not once per process that runs tests.
pytestmark = pytest.mark.xdist_group("launchers")

TRAIN = ("train", "--recipe", "digits", "--epochs", 1, "--density", 0.05, "--timeout", 60)
ENDLESS = ("train", "--recipe", "digits", "--epochs", 100_000, "--timeout", 600)

# What bounds a hang here: on a slow machine less, but far from a peer's timeout.
SECONDS = 60

needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=str(why_no_mpi()))


def unlaunched(**changes: object) -> dict[str, str]:
    """Our environment without any launcher's variables."""
    foreign = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_")
    clean = {name: value for name, value in environment().items() if not name.startswith(foreign)}
    return {**clean, **{name: str(value) for name, value in changes.items()}}


def slurm(task: int, **changes: object) -> dict[str, str]:
    """What srun tells one of two tasks; the job's number is ours, so that no other test meets at its port."""
    step = {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 0, "SLURM_NTASKS": 2, "SLURM_PROCID": task}
    return unlaunched(**step, **changes)


def ended_well(process: "subprocess.Popen[str]") -> tuple[str, str]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    return out, err


def shows_one_run(out: str, err: str) -> None:
    """One line for the one epoch, one table, and not a word from the other rank."""
    assert out.count("test accuracy") == 1
    assert "2 workers" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["spardl epoch 1/1"]


@contextmanager
def under_mpiexec(ranks: int, *arguments: object) -> "Iterator[subprocess.Popen[str]]":
    command = [MPIEXEC, "-n", ranks, sys.executable, "-m", "spardl", *arguments]
    with subprocess.Popen(
        [str(word) for word in command],
        env=unlaunched(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_mpi
@pytest.mark.slow  # the next one trains under mpiexec as well
def test_train_runs_as_ranks_of_mpiexec() -> None:
    """Nothing but mpiexec's own variables says who is who and where to meet."""
    with under_mpiexec(2, *TRAIN) as process:
        shows_one_run(*ended_well(process))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_under(pid: int, variable: str) -> dict[int, int]:
    """The process of each rank among a launcher's grandchildren."""
    found = {}
    for process in (grandchild for child in children(pid) for grandchild in children(child)):
        for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{variable}=".encode()):
                found[int(entry.partition(b"=")[2])] = process
    return found


def wait_for_an_epoch(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "epoch 1/" in first, first


@pytest.mark.slow  # starts mpiexec and ranks that train
@needs_mpi
def test_a_killed_rank_ends_all_ranks_of_mpiexec() -> None:
    """mpiexec says what happened, nobody adds a traceback, and no process is left."""
    with under_mpiexec(2, *ENDLESS) as process:
        wait_for_an_epoch(process)
        ranks = ranks_under(process.pid, "PMI_RANK")
        assert sorted(ranks) == [0, 1]
        ends = [os.pidfd_open(pid) for pid in ranks.values()]
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode != 0
        assert "Traceback" not in err
        for end in ends:
            ended, _, _ = select.select([end], [], [], SECONDS)
            os.close(end)
            assert ended, "a rank was left behind"


@pytest.mark.slow  # as with mpiexec above
def test_a_task_of_srun_that_is_killed_ends_the_others() -> None:
    """srun leaves the other tasks alone; they notice by themselves, long before the timeout, and say so."""
    with ExitStack() as stack:
        tasks = []
        for task in (0, 1):
            tasks.append(stack.enter_context(start(*ENDLESS, env=slurm(task, SLURM_NNODES=1))))
            stack.callback(tasks[task].kill)
        wait_for_an_epoch(tasks[0])
        tasks[1].kill()
        out, err = tasks[0].communicate(timeout=SECONDS)
    complaints = [line for line in err.splitlines() if "epoch" not in line]
    assert tasks[0].returncode == 1
    assert len(complaints) == 1
    # Which of these depends on what rank 0 was doing: a round, an agreement, or counting over all ranks.
    alone = r"rank (1 at 127\.0\.0\.1:\d+ closed the connection|1 \(127\.0\.0\.1\) (broke off|is gone)|0 lost a peer)"
    told = rf"spardl: ({alone}|a collective failed: rank 1 (\(127\.0\.0\.1\) )?is gone)"
    assert re.match(told, complaints[0]), complaints
    assert out == ""


# --- several hosts ------------------------------------------------------------------------------------------------

# Two hosts, each a network namespace with an address of its own, on one bridge; all of it is gone when this ends.
# The first argument is a file of host names. One more argument for each host: a file of its rank's variables.
TWO_HOSTS = """
set -eu
mount -t tmpfs none /run
mkdir /run/netns
mount --bind "$1" /etc/hosts
ip link add bridge type bridge
ip link set bridge up
for host in 1 2; do
    ip netns add "host$host"
    ip link add "port$host" type veth peer name wire netns "host$host"
    ip link set "port$host" master bridge up
    ip -n "host$host" addr add "10.77.0.$host/24" dev wire
    ip -n "host$host" link set wire up
    ip -n "host$host" link set lo up
done
ip netns exec host2 env $3 "${@:4}" &
second=$!
ip netns exec host1 env $2 "${@:4}"
wait $second
"""


def why_no_hosts() -> str | None:
    """What keeps this machine from playing two hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no {program}(8) here"
    trial = "mount -t tmpfs none /run && mkdir /run/netns && ip netns add trial && ip link add trial type bridge"
    tried = subprocess.run(["unshare", "-n", "-m", "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"no network namespace can be made here: {tried.stderr.strip()}" if tried.returncode else None


@pytest.fixture(scope="module")
def hosts() -> None:
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)


def on_two_hosts(folder: Path, first: Mapping[str, object], second: Mapping[str, object]) -> tuple[str, str]:
    """Train as one rank on each host, started with these variables."""
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n10.77.0.1 node01\n10.77.0.2 node02\n")
    ranks = (" ".join(f"{name}={value}" for name, value in rank.items()) for rank in (first, second))
    train = [sys.executable, "-m", "spardl", *(str(word) for word in TRAIN)]
    process = subprocess.Popen(
        ["unshare", "-n", "-m", "bash", "-c", TWO_HOSTS, "hosts", str(names), *ranks, *train],
        env=unlaunched(GLOO_SOCKET_IFNAME="wire", OMP_NUM_THREADS=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        return ended_well(process)


def test_train_runs_across_hosts(hosts: None, tmp_path: Path) -> None:
    """Each rank on a host with an address of its own, told where rank 0 is, as torchrun tells it on several nodes."""
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500}
    shows_one_run(*on_two_hosts(tmp_path, {"RANK": 0, **common}, {"RANK": 1, **common}))


@pytest.mark.slow  # their places are read in test_place.py
def test_tasks_of_srun_meet_on_the_first_host_of_its_list(hosts: None, tmp_path: Path) -> None:
    """Slurm's list of nodes and the job's number are all that they need."""
    common = {"SLURM_JOB_ID": 77, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 2, "SLURM_NNODES": 2}
    common["SLURM_STEP_NODELIST"] = "node[01-02]"
    shows_one_run(*on_two_hosts(tmp_path, {"SLURM_PROCID": 0, **common}, {"SLURM_PROCID": 1, **common}))
