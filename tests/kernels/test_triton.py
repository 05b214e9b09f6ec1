"""Kernels in Triton, without a GPU: their bits in its interpreter, and whether it compiles them for GPUs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spardl import kernels

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spardl.kernels.triton import EXACTLY, loops

kinds = {
    "accumulate": "*fp32 *fp32 *i64 *i8 *i8 i32 i32 i32 i32 fp32",
    "count_above": "*fp32 *i64 i32 fp32",
    "take_above": "*fp32 *i64 *i32 *fp32 i32 i32 fp32",
    "scatter_add": "*fp32 *i64 *i32 *fp32 i32",
    "round_bf16": "*fp32 *i16 *fp32 i32",
    "count_digits": "*fp32 *i64 *i64 *i64 *i32 i32",
    "count_chosen": "*fp32 *i64 *i64 *i64 *i64 *i64 i32",
    "take_chosen": "*fp32 *i64 *i64 *i64 *i64 *i64 *i64 *i64 *i32 *fp32 i32",
    "write_fixed": "*i32 *i64 *i32",
    "count_ones": "*i32 *i64 *i64 *i64 i32",
    "read_fixed": "*i32 *i64 *i64 *i64 *i64 i32",
}
options = {name: value for name, value in EXACTLY.items() if name != "TILE"}
for name, kind in kinds.items():
    function = getattr(loops, name)
    signature = dict(zip(function.arg_names, [*kind.split(), "constexpr"], strict=True))
    source = ASTSource(function, signature, {"TILE": EXACTLY["TILE"]})
    found = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    assert found.asm["cubin"] and ".target sm_CAPABILITY" in found.asm["ptx"]
    assert "fma" not in found.asm["ptx"] and ".ftz" not in found.asm["ptx"], name
print(len(kinds), "compiled")
"""


def run(*command: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@needs_triton
def test_kernels_in_triton_have_the_bits_of_those_in_torch() -> None:
    """In a process of its own: Triton reads the variable when a kernel is defined."""
    assert run(str(HERE / "triton_bits.py"), TRITON_INTERPRET="1") == "the same bits"


@needs_triton
@pytest.mark.parametrize("capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))])
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path, capability: int) -> None:
    """No product is fused with a sum, and no denormal flushed: both would change bits."""
    program = COMPILE.replace("CAPABILITY", str(capability))
    assert run("-c", program, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0") == "11 compiled"


def test_cuda_devices_get_triton_where_it_is_and_plain_torch_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 3)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert type(kernels.for_device.__wrapped__(device)).__name__ == "TorchKernels"
    monkeypatch.undo()
    if importlib.util.find_spec("triton") is not None:
        assert type(kernels.for_device.__wrapped__(device)).__name__ == "TritonKernels"
