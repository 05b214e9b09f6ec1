"""The hot loops: what they promise (`api.py`), compiled for CPUs (`cpu/`), in plain torch for any device (`torch.py`),
and some of them in Triton for CUDA devices, where it is installed (`triton/`).

`for_device` picks the kernels. `cache.py` knows where compiled code is kept, and who compiles it.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import device as Device  # not `import torch`: in this package that name is the module of kernels

from spardl.kernels.api import Kernels
from spardl.kernels.cache import import_compiled

__all__ = ["Kernels", "for_device", "load"]


@functools.cache
def for_device(device: Device) -> Kernels:
    """The kernels for what is on this device. Whoever needs some chooses once and hands them down."""
    if device.type == "cpu":
        compiled: Kernels = load("spardl.kernels.cpu.compiled").CompiledKernels()
        return compiled
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        fused: Kernels = importlib.import_module("spardl.kernels.triton").TritonKernels(fills=True)
        return fused
    portable: Kernels = importlib.import_module("spardl.kernels.torch").TorchKernels(fills=True)
    return portable


@functools.cache
def load(name: str) -> ModuleType:
    """Import a module of compiled loops."""
    return import_compiled(name)
