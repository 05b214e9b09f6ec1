"""What `make dist` builds works without the repository, on a core install: torch, numpy and numba."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from commands import environment
from spardl.version import __version__

ROOT = Path(__file__).parent.parent
EXTRAS = "rich,sklearn,tensorboard,matplotlib,PIL,mpi4py,lightning,accelerate,transformers"
# Python runs this at its start, and in the ranks that a command starts.
BLOCKER = f"import sys\nfor name in {EXTRAS!r}.split(','):\n    sys.modules[name] = None\n"

pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An otherwise empty folder into which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return folder


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """What a command of the installed package prints, in a folder that is not the repository's, without a compiler: no
    program at all can be found."""
    env = environment(PYTHONPATH=installed, PATH="")
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {path for path in (source / "spardl").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(source).as_posix() for path in files}
    assert {"spardl/py.typed", "spardl/dashboard/page.js"} <= names


def test_the_source_archive_has_what_tests_and_pages_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = ["pyproject.toml", "LICENSE", "README.md", "CITATION.cff", "Makefile", "constraints.txt", "mkdocs.yml"]
    assert {*needed, "tests/conftest.py", "docs/architecture.md", "examples/ddp.py"} <= names


def test_installed_alone_it_starts_and_lists_its_methods(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import spardl; print(spardl.__file__)").strip()
    assert Path(where).is_relative_to(installed)
    assert "usage: spardl" in run(installed, tmp_path, "-m", "spardl", "--help")
    assert "Zhao et al." in run(installed, tmp_path, "-m", "spardl", "methods")
    script = installed / "bin" / "spardl"
    assert os.access(script, os.X_OK)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installed_alone_it_compiles_its_loops_simulates_measures_and_trains(installed: Path, tmp_path: Path) -> None:
    """Loops are compiled anew, by numba, since what is compiled is kept beside the source."""
    elements = ("--elements", "1000", "--workers")
    assert "nothing lost" in run(installed, tmp_path, "-m", "spardl", "simulate", *elements, "4")
    assert "spardl" in run(installed, tmp_path, "-m", "spardl", "bench", *elements, "2", "--methods", "dense,spardl")
    script = shutil.copy(ROOT / "examples" / "ddp.py", tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "loss" in run(installed, tmp_path, *torchrun, script)


def test_whoever_cites_it_or_reads_what_changed_finds_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [__version__]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == __version__
