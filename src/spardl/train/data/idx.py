"""MNIST and sets of its format: IDX files, gzipped or not. http://yann.lecun.com/exdb/mnist"""

import gzip
import math
import struct
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.errors import DataError
from spardl.train.data.files import missing, places, reading, subset_note
from spardl.train.dataset import DataSet
from spardl.train.source import Batch, Examples
from spardl.train.tasks import Classification

IMAGE_SIDE = 28
CLASSES = 10
OFFICIAL = (60_000, 10_000)
LARGEST = 1 << 30


def mnist(directory: Path | None = None) -> DataSet:
    """Handwritten digits."""
    return _load("mnist", directory, mean=0.1307, std=0.3081)


def fashion_mnist(directory: Path | None = None) -> DataSet:
    """Pieces of clothing."""
    return _load("fashion-mnist", directory, mean=0.2860, std=0.3530)


def normalise(batch: Batch, *, mean: float, std: float) -> Batch:
    """Bytes to floats of mean 0 and variance 1."""
    images, labels = batch
    return (images.float() / 255 - mean) / std, labels


def _load(name: str, directory: Path | None, *, mean: float, std: float) -> DataSet:
    train, test = (_read_part(name, directory, prefix) for prefix in ("train", "t10k"))
    prepare = partial(normalise, mean=mean, std=std)
    return DataSet(
        name=name,
        train=Examples(*train, prepare=prepare),
        test=Examples(*test, prepare=prepare),
        task=Classification(),
        facts={"classes": CLASSES, "channels": 1},
        note=subset_note("images", len(train[1]), len(test[1]), OFFICIAL),
    )


def _read_part(name: str, directory: Path | None, prefix: str) -> tuple[Tensor, Tensor]:
    image_file = _find(name, directory, f"{prefix}-images-idx3-ubyte")
    label_file = _find(name, directory, f"{prefix}-labels-idx1-ubyte")
    images, labels = _read_idx(image_file, 3), _read_idx(label_file, 1)
    if images.shape[1:] != (IMAGE_SIDE, IMAGE_SIDE):
        found = f"{images.shape[1]} x {images.shape[2]}"
        raise DataError(f"{image_file} holds images of {found}, not {IMAGE_SIDE} x {IMAGE_SIDE}.")
    if len(images) != len(labels) or not len(labels):
        raise DataError(f"{image_file} holds {len(images):,} images, but {label_file} holds {len(labels):,} labels.")
    if labels.max() >= CLASSES:
        raise DataError(f"{label_file} holds the label {labels.max()}, but there are 0 to {CLASSES - 1} only.")
    return torch.tensor(images).unsqueeze(1), torch.tensor(labels.astype(np.int64))


def _find(name: str, directory: Path | None, file: str) -> Path:
    for folder in places(name, directory):
        for path in (folder / file, folder / f"{file}.gz"):
            if path.is_file():
                return path
    raise missing(name, directory)


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """An array of bytes: two zeros, the type (8), the number of dimensions, their sizes, the content."""
    magic = bytes((0, 0, 8, dimensions))
    with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start, sizes = file.read(4), file.read(4 * dimensions)
        if start != magic:
            raise DataError(f"{path} starts with {start.hex() or 'nothing'}, not with {magic.hex()} as it should.")
        if len(sizes) < 4 * dimensions:
            raise DataError(f"{path} ends within its header.")
        shape = struct.unpack(f">{dimensions}I", sizes)
        size = math.prod(shape)
        if size > LARGEST:
            raise DataError(f"{path} announces {size:,} bytes, far more than any official file; it is another one.")
        content = file.read(size + 1)
    if len(content) != size:
        found = f"{len(content):,}" if len(content) < size else "more"
        raise DataError(f"{path} announces {size:,} bytes of content and holds {found}; it is damaged or cut off.")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
