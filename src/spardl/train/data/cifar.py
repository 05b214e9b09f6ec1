"""CIFAR-10 and CIFAR-100, from the binary or the Python version of the official files.

Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.errors import DataError
from spardl.train.data.files import missing, places, reading, subset_note
from spardl.train.data.pickles import read_table
from spardl.train.dataset import DataSet
from spardl.train.source import Batch, Examples
from spardl.train.tasks import Classification

IMAGE_SIDE = 32
PIXELS = 3 * IMAGE_SIDE * IMAGE_SIDE
PADDING = 4
OFFICIAL = (50_000, 10_000)
LARGEST_FILE = 1 << 29  # several times the largest official one

# Per channel, of pixels in [0, 1]; CIFAR-100 goes by the same, as in the papers.
MEAN = torch.tensor((0.491, 0.482, 0.447)).view(3, 1, 1)
STD = torch.tensor((0.247, 0.243, 0.262)).view(3, 1, 1)
BLACK = -MEAN / STD


class LabelledImages(NamedTuple):
    """Images as bytes, count x 3 x 32 x 32, and their classes."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Version:
    """One format of the official files: where they lie, what they are called, and how one is read."""

    folder: str
    train: tuple[str, ...]
    test: str
    read: Callable[[Path, int], LabelledImages]


def cifar10(directory: Path | None = None) -> DataSet:
    """Ten classes. Of the two versions, the one with more images; the binary one if they have equally many."""
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    binary = Version(
        "cifar-10-batches-bin", tuple(f"{name}.bin" for name in batches), "test_batch.bin", _read_binary(1)
    )
    python = Version("cifar-10-batches-py", tuple(batches), "test_batch", _read_python("labels"))
    return _cifar("cifar10", directory, 10, (binary, python))


def cifar100(directory: Path | None = None) -> DataSet:
    """A hundred classes (the fine labels), otherwise as CIFAR-10."""
    binary = Version("cifar-100-binary", ("train.bin",), "test.bin", _read_binary(2))
    python = Version("cifar-100-python", ("train",), "test", _read_python("fine_labels"))
    return _cifar("cifar100", directory, 100, (binary, python))


def normalise(batch: Batch) -> Batch:
    """Bytes to floats of mean 0 and variance 1 per channel."""
    images, labels = batch
    return (images.float() / 255 - MEAN) / STD, labels


def shift_and_flip(batch: Batch, generator: torch.Generator) -> Batch:
    """Each image at a random place of a black frame 4 pixels wider on all sides, half of them mirrored."""
    images, labels = batch
    count = len(images)
    framed = BLACK.expand(count, 3, IMAGE_SIDE + 2 * PADDING, IMAGE_SIDE + 2 * PADDING).clone()
    framed[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    top, left = torch.randint(2 * PADDING + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    across = torch.arange(IMAGE_SIDE)
    rows = top + across
    columns = left + torch.where(mirrored, across.flip(0), across)
    which = torch.arange(count).view(-1, 1, 1, 1)
    channels = torch.arange(3).view(1, -1, 1, 1)
    return framed[which, channels, rows[:, None, :, None], columns[:, None, None, :]], labels


def _cifar(name: str, directory: Path | None, classes: int, versions: Sequence[Version]) -> DataSet:
    found: list[tuple[LabelledImages, LabelledImages]] = []
    for version in versions:
        paths = _find(name, directory, version)
        if paths is not None:
            train, test = paths
            found.append((_join([version.read(path, classes) for path in train]), version.read(test, classes)))
            if _counts(found[-1]) == OFFICIAL:
                break
    if not found:
        raise missing(name, directory)
    best = max(found, key=lambda parts: sum(_counts(parts)))
    return DataSet(
        name=name,
        train=Examples(*_tensors(best[0]), prepare=normalise, augment=shift_and_flip),
        test=Examples(*_tensors(best[1]), prepare=normalise),
        task=Classification(),
        facts={"classes": classes, "channels": 3},
        note=subset_note("images", *_counts(best), OFFICIAL),
    )


def _counts(parts: tuple[LabelledImages, LabelledImages]) -> tuple[int, int]:
    return len(parts[0].labels), len(parts[1].labels)


def _find(name: str, directory: Path | None, version: Version) -> tuple[list[Path], Path] | None:
    """The files of this version; some of the training files may be missing, the test file may not."""
    for folder in places(name, directory, version.folder):
        train = [folder / file for file in version.train if (folder / file).is_file()]
        test = folder / version.test
        if train and test.is_file():
            return train, test
        if train and folder.name == version.folder:
            raise DataError(f"{folder} holds {train[0].name}, but not {test.name}, which data set {name} needs too.")
    return None


def _read_binary(label_bytes: int) -> Callable[[Path, int], LabelledImages]:
    """Records of labels, the last of which counts, and 3,072 bytes: red, green and blue, row by row."""
    record = label_bytes + PIXELS

    def read(path: Path, classes: int) -> LabelledImages:
        content = np.frombuffer(_content(path), dtype=np.uint8)
        if len(content) == 0 or len(content) % record:
            raise DataError(
                f"{path} has {len(content):,} bytes, which is no whole number of records of {record:,};"
                " it is cut off or another file."
            )
        records = content.reshape(-1, record)
        return _part(path, records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64), classes)

    return read


def _read_python(label_field: str) -> Callable[[Path, int], LabelledImages]:
    """A pickled dictionary with the field `data`, count x 3,072 bytes, and a list of labels."""

    def read(path: Path, classes: int) -> LabelledImages:
        table = read_table(_content(path), str(path))
        data, labels = table.get("data"), table.get(label_field)
        if not isinstance(data, np.ndarray) or not isinstance(labels, list):
            raise DataError(f"{path} has no fields data and {label_field}, only {', '.join(sorted(table))}.")
        if data.shape != (len(labels), PIXELS) or not all(type(label) is int for label in labels):
            raise DataError(f"{path} has data of shape {data.shape} for {len(labels):,} labels.")
        return _part(path, data, np.array(labels, dtype=np.int64), classes)

    return read


def _content(path: Path) -> bytes:
    with reading(path):
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise DataError(f"{path} has {size:,} bytes, far more than any official file; it is another one.")
        return path.read_bytes()


def _part(path: Path, pixels: NDArray[np.uint8], labels: NDArray[np.int64], classes: int) -> LabelledImages:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{path} labels image {wrong[0]:,} as {labels[wrong[0]]}, but there are classes 0 to {classes - 1} only;"
            " it is damaged or another file."
        )
    return LabelledImages(pixels.reshape(-1, 3, IMAGE_SIDE, IMAGE_SIDE), labels)


def _join(parts: list[LabelledImages]) -> LabelledImages:
    return LabelledImages(
        np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts])
    )


def _tensors(part: LabelledImages) -> tuple[Tensor, Tensor]:
    return torch.tensor(part.images), torch.tensor(part.labels)
