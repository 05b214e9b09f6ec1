"""Compiled code is cached: one process compiles, those that start with it wait, later ones read it from disk."""

import json
import os
import subprocess
import sys

import pytest

WORKER = """
import json
import torch
from spardl import kernels

loaded = kernels.for_device(torch.device("cpu"))
found = torch.tensor([3.0, -4.0, 0.0])
assert loaded.keep_largest(found, 1).tolist() == [False, True, False]

from numba.core.dispatcher import Dispatcher
from spardl.kernels.cpu import arithmetic, bf16, framing, gaps, order, selection

modules = (framing, gaps, order, selection, arithmetic, bf16)
loops = {loop for module in modules for loop in vars(module).values() if isinstance(loop, Dispatcher)}
print(json.dumps({
    "misses": sum(sum(loop.stats.cache_misses.values()) for loop in loops),
    "hits": sum(sum(loop.stats.cache_hits.values()) for loop in loops),
    "from": sorted({str(loop.stats.cache_path) for loop in loops}),
}))
"""


def start(folder):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", WORKER], env=environment, stdout=subprocess.PIPE, text=True)


def outcome(worker):
    printed, _ = worker.communicate(timeout=240)
    assert worker.returncode == 0
    return json.loads(printed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_that_start_together_compile_once_and_later_ones_not_at_all(tmp_path):
    """Four on a cold cache: one compiles every loop and the others none. A fifth finds all of them on disk."""
    together = [outcome(worker) for worker in [start(tmp_path) for _ in range(4)]]
    assert sorted(report["misses"] > 0 for report in together) == [False, False, False, True]
    later = outcome(start(tmp_path))
    assert later["misses"] == 0
    assert later["hits"] > 0
    assert all(folder.startswith(str(tmp_path)) for folder in later["from"])
