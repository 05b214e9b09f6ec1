"""Frames keep their bytes: ranks that run different commits of one wire version understand each other.

The sums were made by the first release. A change here is another wire version.
"""

import hashlib

import numpy as np
import pytest
import torch

from spardl.kernels import for_device
from spardl.kernels.torch import TorchKernels
from spardl.sparse import SparseBlocks
from spardl.wire import vector
from spardl.wire.frame import Codec

# Lengths and budgets of the blocks of a frame, and how many entries each has.
SHAPES = [
    ([], [], []),
    ([7], [3], [0]),
    ([100, 0, 9], [10, 0, 9], [10, 0, 4]),
    ([1000, 1000, 1000, 1], [255, 255, 200, 1], [255, 17, 200, 1]),
    ([70_000, 3000], [66_000, 300], [1201, 300]),
]

FRAMES = {
    ("fp32", "rice"): "7831a347104e6fdb927f6986bfc50466863906b7ab339a830aaccc09e3201b40",
    ("fp32", "raw"): "6c93f3372f86d64f2e1a4b0d30930c5279def41aea5f24bc1f606b2320019386",
    ("bf16", "rice"): "819748ccedc012f44da0edead865fd37375e9c01b9dc9cc0da091cd6c600226a",
    ("bf16", "raw"): "a80d31e62aa0bdb3521f9636f700b1b261998a5f8d1d509158699bd4d46d3b4c",
    ("fp16", "rice"): "dad7de82c549d940b91847191ad93a34afa2d4353ad09d731d6d2e314d2aa36c",
    ("fp16", "raw"): "6a7d1e0163d95524eed6dd816a7b7935cf40374e1ba5a85e1a4e8b1d34704246",
    ("int8", "rice"): "98746cbdf51b472494aeeea9db8115ec6a0f7e2bfb6a21ed8e85d8c0338e54a1",
    ("int8", "raw"): "ea7a8ec1b40a46d5d614b2571b36626931f301b512c474ab9cbb561f8deb7dc1",
    ("none", "rice"): "3f1ea3769963ff4ff75fec21636b7761a9779fb9e715badd484d74483552c781",
    ("none", "raw"): "aa3e642770c43d8aacb79747a9b3c8d87bb6837dc0c599bdef00f9112db5a584",
}

KERNELS = for_device(torch.device("cpu"))

VECTORS = {
    "fp32": "2ceaa3536fc6222faf1bcb33c7b45c2979829af7416b4594e240a6aae16c5088",
    "bf16": "b991b712b01e8f7b1ac66cd825ed5238444bddc4df0f82cc11e5ec0f02e96ce8",
    "fp16": "d3b86f7709610f45e814b1e17702e26b26b1ef5892b2b2d8e9cfc352ec5c2e16",
    "int8": "5fe595f26a8cd15a7f172f098b029294519883c8f7271102032b5e42add93336",
}


def numbers(count):
    """Values of many magnitudes and both signs, the same on every machine."""
    steps = np.arange(count, dtype=np.int64)
    return np.ldexp((steps * 7919 % 2003 - 1001) / 64, steps * 31 % 40 - 20).astype(np.float32)


def entries(lengths, counts):
    places = [np.arange(count) * (length // max(count, 1)) for length, count in zip(lengths, counts, strict=True)]
    indices = np.concatenate([np.int64([]), *places]).astype(np.int32)
    values = torch.from_numpy(numbers(len(indices)))
    return SparseBlocks(np.arange(len(counts)), np.array(counts, np.int64), torch.from_numpy(indices), values)


def sum_of(frames):
    return hashlib.sha256(b"".join(np.asarray(frame).tobytes() for frame in frames)).hexdigest()


@pytest.mark.parametrize("kernels", [for_device(torch.device("cpu")), TorchKernels()], ids=["compiled", "torch"])
@pytest.mark.parametrize("values,indices", FRAMES)
def test_frames_have_the_bytes_of_the_first_release(values, indices, kernels):
    codec = Codec(values, indices, kernels)
    frames = []
    for lengths, budgets, counts in SHAPES:
        blocks = (np.array(lengths, np.int64), np.array(budgets, np.int64))
        frames.append(codec.pack(codec.code(entries(lengths, counts)), *blocks))
        frames.append(codec.pack(codec.code(entries(lengths, [0] * len(counts))), *blocks, poisoned=True))
    assert sum_of(frames) == FRAMES[values, indices]


@pytest.mark.parametrize("form", VECTORS)
def test_vectors_have_the_bytes_of_the_first_release(form):
    frames = [vector.pack(torch.from_numpy(numbers(count)), form, KERNELS)[0] for count in (0, 1, 7, 1000)]
    frames.append(vector.pack(torch.from_numpy(numbers(7)), form, KERNELS, poisoned=True)[0])
    assert sum_of(frames) == VECTORS[form]
