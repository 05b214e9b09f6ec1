"""Kernels in Triton, without a GPU: their bits in its interpreter, and whether it compiles them for GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spardl import kernels

HERE = Path(__file__).parent
LOOPS = Path(kernels.__file__).parent / "triton" / "loops.py"
LOOPS_THERE_ARE = 34
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# One process has the interpreter's launches: what they were given is what is compiled.
pytestmark = [pytest.mark.xdist_group("triton"), pytest.mark.timeout(600)]


def run(script: str, *arguments: object, **environment: str) -> str:
    """In a process of its own: Triton reads its variables when a kernel is defined."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each loop was given in the interpreter, while all bits were compared."""
    path = tmp_path_factory.mktemp("triton") / "launched.json"
    assert run("triton_bits.py", path, TRITON_INTERPRET="1") == "the same bits"
    return path


@needs_triton
def test_kernels_in_triton_have_the_bits_of_those_in_torch(launched: Path) -> None:
    assert len(json.loads(launched.read_text())) == LOOPS_THERE_ARE


@needs_triton
@pytest.mark.parametrize("capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))])
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path, launched: Path, capability: int) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    assert run("triton_compile.py", LOOPS, launched, capability, **environment) == f"{LOOPS_THERE_ARE} compiled"


def test_cuda_devices_get_triton_where_it_is_and_plain_torch_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 3)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert type(kernels.for_device.__wrapped__(device)).__name__ == "TorchKernels"
    monkeypatch.undo()
    if importlib.util.find_spec("triton") is not None:
        assert type(kernels.for_device.__wrapped__(device)).__name__ == "TritonKernels"
