"""Images in class folders, as ImageNet is usually kept: train/CLASS/image.jpg, val/CLASS/image.jpg.

Russakovsky et al., "ImageNet large scale visual recognition challenge", 2015.
"""

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spardl.errors import ConfigError, DataError
from spardl.train.data.files import missing, places, reading, subset_note
from spardl.train.dataset import DataSet
from spardl.train.source import Batch, shares, shuffled
from spardl.train.tasks import Classification

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

IMAGE_FILES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TEST_FOLDERS = ("val", "validation", "test")
OFFICIAL = (1_281_167, 50_000)

# Of ImageNet, per channel, of pixels in [0, 1].
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)

# A random crop has at least this share of the image and a width of so many heights; the test sees the middle.
SMALLEST_AREA = 0.08
WIDEST = 4 / 3
ATTEMPTS = 10
TEST_MARGIN = 256 / 224

Box = tuple[float, float, float, float]


def imagenet(directory: Path | None = None, size: int = 224) -> DataSet:
    """The class folders of ILSVRC 2012, or of any part of it."""
    return _load("imagenet", directory, size, OFFICIAL)


def folders(directory: Path | None = None, size: int = 224) -> DataSet:
    """Any images in class folders."""
    return _load("folders", directory, size, None)


class Images:
    """Image files, decoded when they are asked for; a batch is (images, labels), images of `size` x `size`.

    In training, an image is a random part of the file's, mirrored half of the time; in a test, always its middle.
    """

    def __init__(self, paths: Sequence[str], labels: Tensor, size: int, *, training: bool) -> None:
        self.paths = paths
        self.labels = labels
        self.size = size
        self.training = training

    def __len__(self) -> int:
        return len(self.paths)

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        return shuffled(len(self), workers, batch_size, seed=seed, epoch=epoch)

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        return shares(len(self), rank, workers, batch_size)

    def fetch(self, positions: Tensor, generator: torch.Generator) -> Batch:
        chances = torch.rand(len(positions), 1 + 4 * ATTEMPTS, generator=generator).tolist()
        images = torch.stack(
            [
                self._decode(self.paths[position], drawn)
                for position, drawn in zip(positions.tolist(), chances, strict=True)
            ]
        )
        return (images.float() / 255 - MEAN) / STD, self.labels[positions]

    def _decode(self, path: str, drawn: list[float]) -> Tensor:
        if not self.training:
            return decode(path, self.size, middle_of)
        pixels = decode(path, self.size, partial(random_part_of, drawn=drawn[1:]))
        return pixels.flip(2) if drawn[0] < 0.5 else pixels


def decode(path: str, size: int, choose: "Callable[[int, int], Box]") -> Tensor:
    """The part of an image that `choose` picks by its width and height, as bytes: 3 x `size` x `size`."""
    from PIL import Image

    try:
        with reading(Path(path)), Image.open(path) as file:
            box = choose(*file.size)
            pixels = _part(file, box, size)
    except (DataError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} cannot be decoded as an image ({error}); repair or remove it.") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _part(file: "Image", box: Box, size: int) -> "np.typing.NDArray[np.uint8]":
    from PIL import Image

    part = file.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.array(part)


def middle_of(width: int, height: int) -> Box:
    """The middle square, 7/8 as wide as the shorter side: resize to 256, cut out 224."""
    side = min(width, height) / TEST_MARGIN
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_part_of(width: int, height: int, *, drawn: Sequence[float]) -> Box:
    """A part of random area and shape, by numbers in [0, 1), four for each attempt; the middle if none fits.

    Szegedy et al., "Going deeper with convolutions", 2014.
    """
    for first in range(0, len(drawn), 4):
        area, shape, across, down = drawn[first : first + 4]
        pixels = width * height * (SMALLEST_AREA + (1 - SMALLEST_AREA) * area)
        ratio = WIDEST ** (2 * shape - 1)
        wide, high = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return left, top, left + wide, top + high
    return middle_of(width, height)


def _load(name: str, directory: Path | None, size: int, official: tuple[int, int] | None) -> DataSet:
    if size < 1:
        raise ConfigError(f"images of {size} pixels hold nothing; give 1 or more.")
    train_folder, test_folder = _find(name, directory)
    classes = _classes(train_folder)
    if not classes:
        raise DataError(f"{train_folder} holds no class folders; {name} needs one folder of images for each class.")
    train = _list(train_folder, classes, size, training=True)
    test = _list(test_folder, classes, size, training=False)
    return DataSet(
        name=name,
        train=train,
        test=test,
        task=Classification(),
        facts={"classes": len(classes), "channels": 3},
        note=subset_note("images", len(train), len(test), official) if official else "",
    )


def _find(name: str, directory: Path | None) -> tuple[Path, Path]:
    for folder in places(name, directory):
        tests = [folder / test for test in TEST_FOLDERS if (folder / test).is_dir()]
        if (folder / "train").is_dir() and tests:
            return folder / "train", tests[0]
    raise missing(name, directory)


def _classes(folder: Path) -> list[str]:
    with reading(folder), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _list(folder: Path, classes: list[str], size: int, *, training: bool) -> Images:
    """All images of a split. Classes are numbered by the training folders; a test may lack some, but add none."""
    strange = sorted(set(_classes(folder)) - set(classes))
    if strange:
        raise DataError(f"{folder} holds the class folder {strange[0]}, which the training images do not have.")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images(folder / name)
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise DataError(
            f"{folder} holds no images in class folders such as {folder / classes[0]}; image files end in"
            f" {', '.join(IMAGE_FILES)}."
        )
    return Images(paths, torch.tensor(labels), size, training=training)


def _images(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    with reading(folder), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.name.lower().endswith(IMAGE_FILES) and entry.is_file())
