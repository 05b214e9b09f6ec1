"""Where real data lies, if it does, and a cache of each test's own."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads what another one, or the user, has parsed."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SPARDL_CACHE", str(folder))
    return folder


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Path:
    """The directory of SPARDL_TEST_DATA, if it holds what the test's parameter names; skips otherwise."""
    root = os.environ.get("SPARDL_TEST_DATA")
    if not root:
        pytest.skip("SPARDL_TEST_DATA names no directory with real data")
    folder = Path(root) / request.param
    if not folder.exists():
        pytest.skip(f"SPARDL_TEST_DATA has no {request.param}")
    return Path(root)
