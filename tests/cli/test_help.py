"""The command line starts fast, because nothing heavy is imported before a command needs it."""

import subprocess
import sys

import pytest

from commands import spardl
from spardl.cli.commands import COMMANDS
from spardl.version import __version__

HEAVY = ("torch", "numba", "sklearn", "rich", "matplotlib")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help answers at once: torch alone would take seconds. Commands whose options are those of methods import the
    methods' own files, and with them numpy, a tenth of a second; the list of commands does without."""
    heavy = (*HEAVY, "numpy") if arguments == ["--help"] else HEAVY
    program = (
        "import sys\n"
        "from spardl.cli import execute\n"
        "try:\n"
        f"    execute({arguments!r})\n"
        "finally:\n"
        f"    print('heavy:', [name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: spardl" in done.stdout
    assert done.stderr == "heavy: []\n"


def test_help_names_every_command() -> None:
    """Without arguments, the command line says what it can do."""
    answer = spardl()
    assert answer.returncode == 0
    assert all(name in answer.stdout for name in COMMANDS)


def test_the_version_is_the_package_version() -> None:
    """`spardl --version` says what is installed."""
    assert spardl("--version").stdout == f"spardl {__version__}\n"
