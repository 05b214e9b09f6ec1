"""MNIST's format, gzipped or not."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from spardl.errors import DataError
from spardl.train.data import load_data
from spardl.train.data.idx import fashion_mnist, mnist


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_set(folder: Path, *, zipped: bool = True, counts: tuple[int, int] = (30, 10)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for prefix, count in zip(("train", "t10k"), counts, strict=True):
        write(folder, f"{prefix}-images-idx3-ubyte", generator.integers(0, 256, (count, 28, 28), np.uint8), zipped)
        write(folder, f"{prefix}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8), zipped)


def write(folder: Path, name: str, array: np.ndarray, zipped: bool) -> None:
    content = idx(array)
    (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_files_are_read_gzipped_or_not(tmp_path: Path, name: str, zipped: bool) -> None:
    """In the directory itself or in its subfolder of the set's name."""
    write_set(tmp_path / name, zipped=zipped)
    for directory in (tmp_path, tmp_path / name):
        data = load_data(name, directory)
        assert data.facts == {"classes": 10, "channels": 1}
        images, labels = data.test.fetch(torch.arange(10), torch.Generator())
        assert images.shape == (10, 1, 28, 28) and labels.tolist() == list(range(10))
        assert data.note == "a subset: 30 of 60,000 training images and 10 of 10,000 test images"


IMAGES = "train-images-idx3-ubyte.gz"
LABELS = "train-labels-idx1-ubyte.gz"


def packed(array: np.ndarray, dtype: type = np.uint8) -> bytes:
    return gzip.compress(idx(array.astype(dtype)))


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (IMAGES, b"not gzip", "damaged or cut off"),
        (IMAGES, packed(np.zeros((30, 28, 28)))[:-20], "damaged or cut off"),
        (IMAGES, gzip.compress(b""), "starts with nothing, not with 00000803"),
        (IMAGES, packed(np.zeros(30)), "starts with 00000801, not with 00000803"),
        (IMAGES, gzip.compress(bytes((0, 0, 8, 3, 0))), "ends within its header"),
        (IMAGES, gzip.compress(idx(np.zeros((30, 28, 28), np.uint8))[:-1]), "23,520 bytes of content and holds 23,519"),
        (IMAGES, gzip.compress(idx(np.zeros((30, 28, 28), np.uint8)) + b"x"), "and holds more"),
        (IMAGES, gzip.compress(bytes((0, 0, 8, 3)) + b"\xff" * 12), "far more than any official file"),
        (IMAGES, packed(np.zeros((30, 27, 28))), "images of 27 x 28, not 28 x 28"),
        (LABELS, packed(np.zeros(29)), "30 images, but .* 29 labels"),
        (LABELS, packed(np.full(30, 10)), "the label 10, but there are 0 to 9"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, sentence: str) -> None:
    """The sentence says which file, what was expected and what was found."""
    write_set(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        mnist(tmp_path)
    assert file in str(caught.value)


@pytest.mark.parametrize("real", ["mnist"], indirect=True)
def test_the_real_mnist_has_the_known_mean_and_spread(real: Path) -> None:
    """So that normalised images have mean 0 and variance 1."""
    data = mnist(real)
    images, _ = data.train.fetch(torch.arange(len(data.train)), torch.Generator())
    assert (len(data.train), len(data.test), data.note) == (60_000, 10_000, "")
    assert abs(float(images.mean())) < 1e-3 and abs(float(images.std()) - 1) < 1e-3


@pytest.mark.parametrize("real", ["fashion-mnist"], indirect=True)
def test_the_real_fashion_mnist_loads(real: Path) -> None:
    """All ten classes occur."""
    data = fashion_mnist(real)
    images, labels = data.train.fetch(torch.arange(len(data.train)), torch.Generator())
    assert labels.unique().numel() == 10
    assert abs(float(images.mean())) < 0.02 and abs(float(images.std()) - 1) < 0.02
