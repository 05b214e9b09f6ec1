"""The hot loops: compiled for CPU, plain torch for any other device, same signatures.

They return arrays of their own kind, numpy's or torch's; the compiled ones take both.

`for_device` picks the module. Compiled code is cached on disk; the first process on a machine compiles (10 to 25 s)
while the others wait for it, so that N workers compile once and not N times.
"""

import contextlib
import fcntl
import functools
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


@functools.cache
def for_device(device: torch.device) -> ModuleType:
    """The kernels for what is on this device."""
    if device.type == "cpu":
        return load("spardl.kernels.compiled")
    return importlib.import_module("spardl.kernels.portable")


def for_array(array: Any) -> ModuleType:
    """The kernels for this array: numpy's are a CPU's."""
    return load("spardl.kernels.compiled") if isinstance(array, np.ndarray) else for_device(array.device)


@functools.cache
def load(name: str) -> ModuleType:
    """Import a module of compiled loops."""
    with _one_at_a_time():
        started = time.monotonic()
        module = importlib.import_module(name)
        if time.monotonic() - started > 3:
            logger.info(
                "compiled the kernels in %.0f s; the next start reads them from disk", time.monotonic() - started
            )
    return module


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock file beside the compiled code, or in the temporary folder where the package is read-only."""
    for folder in (Path(__file__).parent / "__pycache__", Path(tempfile.gettempdir()) / f"spardl-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(folder / "compile.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
        return
    yield
