"""What mpiexec and srun tell a rank in its environment: who it is and, where they say it, where the ranks meet.

Open MPI, MPICH (and Intel MPI, which starts ranks alike) and Slurm. No torch here.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spardl.errors import ConfigError

LOOPBACK = "127.0.0.1"

# Where a port is made up it is one of these: below the ports that Linux gives to outgoing connections.
FIRST_PORT, PORTS = 20_000, 12_000

# Slurm numbers steps from 0; from here on are its own: the batch script, an interactive shell, an outside login.
FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class Told:
    """What a launcher has told one rank; `host` and `port` are None where it did not say enough to know."""

    launcher: str
    rank: int
    workers: int
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class _MPI:
    """The variables in which an MPI launcher numbers ranks, counts them, and counts those on this host."""

    launcher: str
    rank: str
    workers: str
    here: str


OPEN_MPI = _MPI("Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", here="OMPI_COMM_WORLD_LOCAL_SIZE")
MPICH = _MPI("mpiexec", "PMI_RANK", "PMI_SIZE", here="MPI_LOCALNRANKS")


def heard_from_launcher(environment: Mapping[str, str]) -> Told | None:
    """What Open MPI, MPICH or Slurm says, in this order; None where none of them has started this process as a rank.

    srun may set MPICH's variables too, for programs that speak PMI; then Slurm knows more.
    """
    told = _heard_from_mpi(OPEN_MPI, environment) or _heard_from_mpi(MPICH, environment)
    slurm = _heard_from_slurm(environment)
    if told is None:
        return slurm
    if told.host is None and slurm and (slurm.rank, slurm.workers) == (told.rank, told.workers):
        return slurm
    return told


def _heard_from_mpi(names: _MPI, environment: Mapping[str, str]) -> Told | None:
    if names.rank not in environment or names.workers not in environment:
        return None
    rank, workers = whole(names.rank, environment), whole(names.workers, environment)
    if workers > 1 and environment.get(names.here) != str(workers):
        return Told(names.launcher, rank, workers)
    starter = _starter({name: environment[name] for name in (names.rank, names.workers)})
    return Told(names.launcher, rank, workers, LOOPBACK, _port_for(starter))


def _heard_from_slurm(environment: Mapping[str, str]) -> Told | None:
    """A task of an srun step. A batch script or a shell inside an allocation has many of the variables and is none."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    step = whole("SLURM_STEP_ID", environment)
    tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), None)
    if step >= FIRST_SPECIAL_STEP or tasks is None:
        return None
    workers = whole(tasks, environment)
    if workers == 1 and "SLURM_PTY_PORT" in environment:  # srun --pty bash: a person's shell
        return None
    port = None
    if "SLURM_JOB_ID" in environment:
        port = _port_for(whole("SLURM_JOB_ID", environment) + 1009 * step)  # steps of one job may run side by side
    return Told("srun", whole("SLURM_PROCID", environment), workers, _slurm_host(environment, workers), port)


def _slurm_host(environment: Mapping[str, str], workers: int) -> str | None:
    """Where task 0 runs: on the step's first host, unless somebody asked for an arbitrary distribution."""
    nodes = (environment[name] for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in environment)
    if workers == 1 or next(nodes, None) == "1":
        return LOOPBACK
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(name):
            return first_host(environment[name])
    return None


def first_host(nodelist: str) -> str:
    """The first of the hosts that Slurm's shorthand lists: `node[01-03,07],gpu1` begins with node01."""
    entry = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodelist)
    if entry is None:
        raise ConfigError(f"the node list {nodelist!r} cannot be read; set MASTER_ADDR to the address of rank 0.")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[0])


def _port_for(identity: int) -> int:
    """A port that all ranks of one run find alike, and other runs hardly ever."""
    return FIRST_PORT + identity % PORTS


def _starter(variables: Mapping[str, str]) -> int:
    """The process that started all ranks on this host: the nearest ancestor that is not this rank itself.

    A script between the two has the rank's variables, its starter does not.
    """
    entries = {f"{name}={value}".encode() for name, value in variables.items()}
    process = os.getppid()
    while process > 1 and entries <= _entries(process):
        process = _parent(process)
    return process


def _entries(process: int) -> set[bytes]:
    """The environment with which a process was started, as far as we may look."""
    try:
        return set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _parent(process: int) -> int:
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def whole(name: str, environment: Mapping[str, str]) -> int:
    """The whole number in this variable."""
    text = environment[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number.") from None
