"""What runs on a device that is not the CPU, in processes of its own: registering a device changes all of torch.

They are forked from this one, which has torch and the compiled kernels already: to load these takes longer than most of
the cases. Autograd has no threads in them, and no case needs any.
"""

from pathlib import Path

import pytest

from forked import module_forked

ROOT = Path(__file__).parent.parent
CASES = ["tests/collectives/far_cases.py", "tests/integrations/far_cases.py", "tests/transport/nccl_cases.py"]


def run(marked: str, cases: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", ROOT, "-m", marked, ROOT / cases]
    done = module_forked("pytest", *options, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", CASES)
def test_all_cases_pass_on_the_device_of_the_tests(cases: str) -> None:
    run("not slow", cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", CASES)
def test_those_that_take_long_pass_there_too(cases: str) -> None:
    run("slow", cases)
