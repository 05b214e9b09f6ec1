"""A rank learns its place from the environment that launchers set."""

import os
import subprocess
import sys

import pytest

from spardl.errors import ConfigError
from spardl.launch.launchers import first_host
from spardl.launch.place import LISTENER, Place

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_launchers_variables_are_the_place() -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say everything."""
    assert Place.from_environment(TORCHRUN) == Place(rank=1, workers=4, host="10.0.0.1", port=29500)


def test_without_a_launcher_there_is_no_place() -> None:
    """An address alone, left in a shell, makes no rank."""
    assert Place.from_environment({"MASTER_ADDR": "10.0.0.1"}) is None


def test_torchrun_keeps_the_store_itself() -> None:
    """Its agent listens at the port already; rank 0 must not."""
    place = Place.from_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert place is not None and place.hosted


def test_our_own_launcher_hands_down_a_listening_socket() -> None:
    """Rank 0 inherits it, so nobody can take the port in between."""
    place = Place.from_environment({**TORCHRUN, LISTENER: "7"})
    assert place is not None and place.listener == 7


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RANK": "4"}, "outside a world of 4"),
        ({"RANK": "-1"}, "outside a world of 4"),
        ({"WORLD_SIZE": "0"}, "1 or more"),
        ({"RANK": "one"}, "not a whole number"),
        ({"MASTER_PORT": "70000"}, "1 to 65535"),
        ({"MASTER_ADDR": ""}, "address of rank 0"),
    ],
)
def test_a_place_that_cannot_be_is_refused(change: dict[str, str], sentence: str) -> None:
    """The sentence names the variable."""
    with pytest.raises(ConfigError, match=sentence) as refusal:
        Place.from_environment({**TORCHRUN, **change})
    assert next(iter(change)) in str(refusal.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_place_is_refused(name: str) -> None:
    """A rank that does not know the others would wait for nobody."""
    with pytest.raises(ConfigError, match=f"without {name}"):
        Place.from_environment({key: value for key, value in TORCHRUN.items() if key != name})


# --- mpiexec and srun ---------------------------------------------------------------------------------------------

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "node[01-03,07],gpu1",
}
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH, {**SLURM, "SLURM_NNODES": "1"}])
def test_ranks_that_share_a_host_meet_there(launcher: dict[str, str]) -> None:
    """Every rank finds the same port by itself, below those that Linux gives to outgoing connections."""
    place = Place.from_environment(launcher)
    assert place is not None and (place.rank, place.workers, place.host) == (1, 4, "127.0.0.1")
    assert 20_000 <= place.port < 32_000
    assert place == Place.from_environment(launcher)


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH, SLURM])
def test_an_address_that_is_given_counts(launcher: dict[str, str]) -> None:
    """On several hosts it is what mpiexec's ranks need; elsewhere it spares guessing."""
    assert Place.from_environment({**launcher, **ADDRESS}) == Place(rank=1, workers=4, host="10.0.0.1", port=29500)


def test_tasks_of_srun_meet_on_the_first_node_of_the_step() -> None:
    """The list is Slurm's shorthand; the port comes from the numbers of job and step, the same on every node."""
    place = Place.from_environment(SLURM)
    assert place is not None and (place.rank, place.workers, place.host) == (1, 4, "node01")
    other = Place.from_environment({**SLURM, "SLURM_STEP_ID": "1"})
    assert other is not None and other.port != place.port


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({**SLURM, **MPICH, **OPEN_MPI, **TORCHRUN, "RANK": "3"}, 3),
        ({**SLURM, **MPICH, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({**SLURM, **MPICH, "PMI_RANK": "0"}, 0),
        (SLURM, 1),
    ],
)
def test_the_innermost_launcher_counts(environment: dict[str, str], rank: int) -> None:
    """torchrun inside mpiexec inside srun: each leaves its variables to the next."""
    place = Place.from_environment(environment)
    assert place is not None and place.rank == rank


def test_srun_that_speaks_pmi_is_still_srun() -> None:
    """With --mpi=pmi2 it sets MPICH's rank and size too, but not how many of them are on this node."""
    place = Place.from_environment({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "4"})
    assert place == Place.from_environment(SLURM)


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[1-2]"},
        {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "40000"},
    ],
    ids=["salloc", "sbatch", "salloc with an interactive step", "srun --pty bash"],
)
def test_a_shell_inside_an_allocation_is_no_rank(shell: dict[str, str]) -> None:
    """What a person starts there starts its own workers."""
    assert Place.from_environment(shell) is None


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH])
def test_ranks_of_mpiexec_on_several_hosts_must_be_told_where_to_meet(launcher: dict[str, str]) -> None:
    """The sentence names the variables that are missing, and only those."""
    *_, here = launcher
    for apart in ({**launcher, here: "2"}, {name: launcher[name] for name in launcher if name != here}):
        with pytest.raises(ConfigError, match=r"set MASTER_ADDR to .* and MASTER_PORT to "):
            Place.from_environment(apart)
        with pytest.raises(ConfigError, match="; set MASTER_PORT to a free port there, the same on all ranks"):
            Place.from_environment({**apart, "MASTER_ADDR": "10.0.0.1"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"SLURM_STEP_NODELIST": "node[01"}, r"node list 'node\[01' cannot be read; set MASTER_ADDR"),
        ({"SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR to the address of rank 0"),
        ({"SLURM_JOB_ID": "none"}, "SLURM_JOB_ID='none' is not a whole number"),
    ],
)
def test_what_slurm_says_in_vain_is_an_error(change: dict[str, str], sentence: str) -> None:
    """It says what was read and what to set."""
    with pytest.raises(ConfigError, match=sentence):
        Place.from_environment({**SLURM, **change})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[01-03,07],gpu1", "node01"),
        ("gpu1,node[01-03]", "gpu1"),
        ("node7", "node7"),
        ("node[9,11]", "node9"),
        ("rack[1-2]-n[004-008],login", "rack1-n004"),
        ("a.example.org", "a.example.org"),
    ],
)
def test_a_node_list_begins_with_its_first_host(nodelist: str, host: str) -> None:
    """Leading zeros belong to the name."""
    assert first_host(nodelist) == host


WRAPPED = "from spardl.launch.place import Place; print(Place.from_environment().port)"


def test_a_script_between_launcher_and_rank_does_not_matter() -> None:
    """The port comes from the process that started all ranks, not from a shell that each has of its own."""
    ports = []
    for rank, through_a_shell in ((0, False), (1, True)):
        command = [sys.executable, "-c", WRAPPED]
        if through_a_shell:
            command = ["sh", "-c", '"$@"; exit $?', "script", *command]
        env = {**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        ports.append(int(done.stdout))
    assert ports[0] == ports[1] == 20_000 + os.getpid() % 12_000
