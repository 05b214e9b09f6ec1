"""Compiled loops find a folder wherever spardl is installed, and the person who waits for them is told once."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spardl
from spardl.kernels import cache

LOOP = """
@njit("float64(float64)", cache=True)
def times_{factor}(number):
    return {factor} * number
"""
MANY, FEW = 15, 3


def loops(count: int) -> str:
    """A module of so many loops."""
    return "\n".join(["from numba import njit", *(LOOP.format(factor=number) for number in range(count))])


PROGRAM = """
import sys
import tempfile

if len(sys.argv) > 1:
    tempfile.tempdir = sys.argv[1]

from spardl.kernels.cache import import_compiled

assert import_compiled("loops").times_2(21.0) == 42.0
"""

NOWHERE = "/dev/null/nowhere"  # below what is no folder: not even root can make it


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a module of loops, beside which compiled code can be kept."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "loops.py").write_text(loops(MANY))
    (tmp_path / "temporary").mkdir()
    return folder


@pytest.fixture
def read_only(installed: Path) -> Path:
    """The same, where nothing can be kept: a file stands in the way."""
    (installed / "__pycache__").touch()
    return installed


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Load the loops in a process whose user has no home."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "TMPDIR")}
    environment |= {"HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE, "TMPDIR": str(installed.parent / "temporary")}
    path = os.pathsep.join([str(installed), str(Path(spardl.__file__).parent.parent)])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def users_folder(installed: Path) -> Path:
    return installed.parent / "temporary" / f"spardl-{os.getuid()}"


def test_the_process_that_compiles_says_so_and_the_next_one_is_quiet(installed: Path) -> None:
    """One line on standard error, although nobody has set up logging."""
    first, second = run(installed), run(installed)
    assert first.returncode == second.returncode == 0
    (line,) = first.stderr.splitlines()
    assert line.startswith("spardl: compiling its loops for this machine") and "later starts read them" in line
    assert second.stderr == ""


def test_a_few_loops_are_compiled_without_a_word(installed: Path) -> None:
    """Nobody has to be told about a second."""
    (installed / "loops.py").write_text(loops(FEW))
    done = run(installed)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow  # the next one has such an install too
def test_a_read_only_install_without_a_home_keeps_its_loops_in_the_temporary_folder(read_only: Path) -> None:
    """The line says where, and what would last longer."""
    first, second = run(read_only), run(read_only)
    assert first.returncode == second.returncode == 0, first.stderr
    (line,) = first.stderr.splitlines()
    assert f"kept in {users_folder(read_only)}: set NUMBA_CACHE_DIR" in line
    assert users_folder(read_only).stat().st_mode & 0o077 == 0
    assert second.stderr == ""


def test_code_is_not_read_from_a_folder_that_others_can_write(read_only: Path) -> None:
    """Anybody may have put it there: a folder of this process alone serves instead, and is removed."""
    users_folder(read_only).mkdir()
    users_folder(read_only).chmod(0o777)
    done = run(read_only)
    assert done.returncode == 0, done.stderr
    assert "kept in " in done.stderr and f"kept in {users_folder(read_only)}:" not in done.stderr
    assert list(users_folder(read_only).parent.iterdir()) == [users_folder(read_only)]


@pytest.mark.slow  # compiles in a process of its own
def test_where_no_folder_can_be_written_at_all_loops_are_compiled_in_memory(read_only: Path) -> None:
    """It is said once, with what to set; numba alone would give up."""
    done = run(read_only, NOWHERE)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "compiled anew in every process: set NUMBA_CACHE_DIR" in line


def test_a_lock_that_another_process_keeps_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It only saves time: whoever has waited long enough compiles as well."""
    monkeypatch.setattr(cache, "_own_folder", lambda: tmp_path)
    monkeypatch.setattr(cache, "LONGEST_WAIT_S", 0.0)
    with (tmp_path / "compile.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with cache._one_at_a_time():
            assert "going on without it" in caplog.text


def test_who_keeps_compiled_code_elsewhere_does_not_wait_for_those_who_keep_it_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LONGEST_WAIT_S", 0.0)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "here"))
    with cache._one_at_a_time():
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "there"))
        with cache._one_at_a_time():
            assert not caplog.records


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_package_runs_from_a_read_only_folder(tmp_path: Path) -> None:
    """Every folder of a copy has a file where compiled code would be kept."""
    source = Path(spardl.__file__).parent
    copy = tmp_path / "installed" / "spardl"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [copy, *(each for each in copy.rglob("*") if each.is_dir())]:
        (folder / "__pycache__").touch()
    (tmp_path / "temporary").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE, "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        [sys.executable, "-m", "spardl", "bench", "--workers", "2", "--elements", "1000", "--repetitions", "2"],
        env=environment | {"PYTHONPATH": str(copy.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling its loops") == 1 and len(done.stderr.splitlines()) == 1
