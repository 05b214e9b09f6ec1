"""What all tests share."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from effort import tries
from spardl.machine import WITHOUT_AMX, claims_amx_in_vain

# Where torch itself is killed by an instruction that the machine only announces, tests go without it. Processes that
# pytest-xdist starts have this environment already.
if "PYTEST_XDIST_WORKER" not in os.environ and claims_amx_in_vain():
    os.environ |= WITHOUT_AMX

# Tests run side by side, and most of them start processes of their own: a thread each is enough.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says something about the machine and nothing about what is tested.
settings.register_profile("any machine", tries(), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_make_parametrize_id(config: Any, val: object, argname: str) -> str | None:
    """Bytes make no names: archives hold the time they were made, and every process must know a test by the same."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """A group of tests that its scheduler did not see would start what its fixtures start once per process."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = (item.nodeid for item in session.items if item.get_closest_marker("xdist_group"))
        unseen = [name for name in grouped if "@" not in name]
        assert not unseen, f"pytest-xdist does not group tests with this version of pytest: {unseen[0]}"
