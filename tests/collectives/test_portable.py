"""Whole methods on the portable kernels, with counts that are read: tensors all the way, and the same bits.

Those that fill, as on devices, are in far_cases.py.
"""

import pytest
import torch

from clusters import Cluster
from spardl import kernels
from spardl.collectives.methods.registry import METHODS
from spardl.config import SyncConfig
from spardl.kernels.torch import TorchKernels


def steps(config: SyncConfig, workers: int) -> list[torch.Tensor]:
    """Results of a few steps, and the residuals after them."""
    generator = torch.Generator().manual_seed(5)
    cluster = Cluster(workers, 1003, config)
    found = []
    for _ in range(3):
        found += cluster.step([torch.randn(1003, generator=generator) ** 3 for _ in range(workers)])
    return found + cluster.residuals()


@pytest.mark.parametrize(
    "values", ["int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bf16", "fp32", "int8", "int1"))]
)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_portable_kernels_synchronise_alike(monkeypatch: pytest.MonkeyPatch, method: str, values: str) -> None:
    config = SyncConfig(method=method, density=0.05, values=values)
    expected = steps(config, 6)
    monkeypatch.setattr(kernels, "for_device", lambda device: TorchKernels())
    assert all(torch.equal(one, other) for one, other in zip(steps(config, 6), expected, strict=True))
