"""The interface between algorithms and hot loops: whoever claims to implement it implements all of it."""

import inspect
import subprocess
import sys

import pytest
import torch

from spardl.kernels import for_device
from spardl.kernels.api import KernelsOf
from spardl.kernels.torch import TorchKernels

PROMISED = [name for name, member in vars(KernelsOf).items() if inspect.isfunction(member) and name[0] != "_"]


@pytest.mark.parametrize("kernels", [for_device(torch.device("cpu")), TorchKernels()], ids=["compiled", "torch"])
@pytest.mark.parametrize("name", PROMISED)
def test_every_kernel_is_there_with_the_parameters_that_were_promised(kernels, name):
    """Inherited from the interface, it would do nothing and return None."""
    assert name in vars(type(kernels))
    promised, found = (inspect.signature(getattr(of, name)).parameters for of in (KernelsOf, type(kernels)))
    assert [(each.name, each.default) for each in found.values()] == [
        (each.name, each.default) for each in promised.values()
    ]


def test_every_promise_says_what_it_is():
    assert len(PROMISED) == 32
    assert all(getattr(KernelsOf, name).__doc__ for name in PROMISED)


def test_kernels_are_chosen_once_per_device():
    assert for_device(torch.device("cpu")) is for_device(torch.device("cpu"))
    assert isinstance(for_device(torch.device("meta")), TorchKernels)


WITHOUT_COMPILER = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None  # importing them fails
import numpy as np, torch
from spardl.kernels import for_device
from spardl.sparse import SparseBlocks
from spardl.wire.frame import Codec

kernels = for_device(torch.device("meta"))
acc = torch.arange(-50.0, 50.0)
blocks = np.array([0]), np.array([100]), np.array([10])
counts, places, codes, fine = kernels.take_rounded(acc, *blocks)
codec, lengths, budgets = Codec("bf16", "rice", kernels), np.array([100]), np.array([10])
frame = codec.pack(codec.coded(np.array([0]), counts, places, codes), lengths, budgets)
found = codec.unpack(frame, np.array([0]), lengths, budgets, peer=1).decode()
print(found.indices.tolist(), codec.capacity(lengths, budgets) >= len(frame))
"""


def test_the_kernels_of_other_devices_need_no_compiler():
    """Selection, rounding and frames, where numba cannot be imported."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    assert found.stdout.strip() == "[0, 1, 2, 3, 4, 5, 96, 97, 98, 99] True", found.stderr
