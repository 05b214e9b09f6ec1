"""What runs on a device that is not the CPU, in a process of its own: registering a device changes all of torch.

Autograd starts a thread per kind of device with the first backward, and whoever forks afterwards has none.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = ["tests/collectives/far_cases.py", "tests/integrations/far_cases.py", "tests/transport/nccl_cases.py"]


def run(marked: str, *cases: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(900)
def test_all_cases_pass_on_the_device_of_the_tests() -> None:
    run("not slow", *CASES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", CASES)
def test_those_that_take_long_pass_there_too(cases: str) -> None:
    run("slow", cases)
