"""Images in class folders."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from spardl.errors import ConfigError, DataError
from spardl.train.data import load_data
from spardl.train.data.folders import MEAN, STD, Images, folders, imagenet, middle_of, random_part_of
from spardl.train.source import batches

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def write_image(path: Path, colour: tuple[int, int, int] = (200, 100, 50), size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_set(directory: Path, *, test: str = "val", images: int = 3) -> Path:
    for part in ("train", test):
        for label, name in enumerate(("ant", "bee", "cat")):
            for number in range(images):
                write_image(directory / part / name / f"{number}.png", colour=(label, number, 0))
    return directory


@pytest.mark.parametrize("test", ["val", "validation", "test"])
def test_classes_are_folders_in_the_order_of_their_names(tmp_path: Path, test: str) -> None:
    """Labels are the same in training and test, files of other kinds are left out."""
    write_set(tmp_path, test=test)
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    data = folders(tmp_path, size=8)
    assert data.facts == {"classes": 3, "channels": 3}
    images, labels = data.test.fetch(torch.arange(9), torch.Generator())
    assert images.shape == (9, 3, 8, 8) and labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    red = ((images * STD + MEAN) * 255).round()[:, 0, 0, 0]
    assert red.tolist() == labels.tolist()
    assert data.note == ""


def test_a_part_of_imagenet_says_so(tmp_path: Path) -> None:
    """Also where a class has no test image."""
    write_set(tmp_path / "imagenet")
    for path in (tmp_path / "imagenet" / "val" / "bee").iterdir():
        path.unlink()
    data = imagenet(tmp_path)
    assert data.note == "a subset: 9 of 1,281,167 training images and 6 of 50,000 test images"
    assert data.test.fetch(torch.arange(1), torch.Generator())[0].shape == (1, 3, 224, 224)


def gradient(path: Path) -> None:
    """Red grows to the right, green downwards."""
    down, across = np.mgrid[0:120, 0:160]
    pixels = np.stack([across, down * 2, np.zeros_like(down)], axis=2).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_training_sees_random_parts_and_the_test_always_the_middle(tmp_path: Path) -> None:
    """Some mirrored; the same generator gives the same parts, in loading processes too."""
    for part in ("train", "val"):
        gradient(tmp_path / part / "a" / "0.png")
    data = folders(tmp_path, size=16)
    places = [torch.zeros(6, dtype=torch.int64)] * 2

    def drawn(source: Images, seed: int, loaders: int = 0) -> torch.Tensor:
        return torch.cat([images for images, _ in batches(source, places, seeds=(seed,), loaders=loaders)])

    first = drawn(data.train, 1)
    assert torch.equal(first, drawn(data.train, 1, loaders=1))
    assert not torch.equal(first, drawn(data.train, 2))
    assert len({image.numpy().tobytes() for image in first}) == 12
    rising = first[:, 0, 8, -1] > first[:, 0, 8, 0]
    assert rising.any() and not rising.all(), "some are mirrored, some are not"
    assert (first[:, 1, -1, 8] > first[:, 1, 0, 8]).all(), "none stands on its head"
    assert torch.equal(drawn(data.test, 1), drawn(data.test, 2))


def test_the_middle_is_seven_eighths_of_the_shorter_side() -> None:
    """Resize to 256, cut out 224."""
    assert middle_of(256, 256) == (16, 16, 240, 240)
    assert middle_of(512, 256) == (144, 16, 368, 240)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 2), (640, 480), (480, 640)])
def test_random_parts_lie_within_the_image(size: tuple[int, int]) -> None:
    """Of at least 8 % of its area, neither wide nor high; very long images give their middle."""
    width, height = size
    for seed in range(50):
        drawn = torch.rand(40, generator=torch.Generator().manual_seed(seed)).tolist()
        left, top, right, bottom = random_part_of(width, height, drawn=drawn)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        if min(size) > 100:
            assert (right - left) * (bottom - top) > 0.079 * width * height
            assert 0.74 < (right - left) / (bottom - top) < 1.35


@pytest.mark.parametrize("kind", ["L", "RGBA", "P", "CMYK"])
def test_images_of_any_colours_become_red_green_and_blue(tmp_path: Path, kind: str) -> None:
    """ImageNet has grey and CMYK files among others."""
    write_set(tmp_path)
    path = tmp_path / "train" / "ant" / ("0.jpg" if kind == "CMYK" else "0.png")
    Image.new(kind, (20, 20)).save(path)
    images, _ = folders(tmp_path, size=4).train.fetch(torch.arange(2), torch.Generator())
    assert images.shape == (2, 3, 4, 4) and images.isfinite().all()


@pytest.mark.parametrize("workers", [1, 2, 4, 30])
def test_all_images_are_used_once_by_whatever_number_of_workers(tmp_path: Path, workers: int) -> None:
    """In the test; in training, no image twice in an epoch, and each rank as many as the others."""
    source = Images([str(number) for number in range(23)], torch.zeros(23), 8, training=False)
    tested = [batch for rank in range(workers) for batch in source.sweep(rank, workers, 3)]
    assert sorted(torch.cat(tested).tolist()) == list(range(23))
    if workers < 8:
        order = source.order(workers, 3, seed=1, epoch=2)
        assert order.shape == (23 // (3 * workers), workers, 3)
        assert order.unique().numel() == order.numel()
        assert torch.equal(order, source.order(workers, 3, seed=1, epoch=2))
        assert not torch.equal(order, source.order(workers, 3, seed=1, epoch=3))


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Empty, foreign, or cut off in the middle."""
    write_set(tmp_path)
    path = tmp_path / "train" / "ant" / "0.png"
    if content is None:
        gradient(path)
        content = path.read_bytes()[:200]
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"ant/0\.png cannot be decoded"):
        folders(tmp_path).train.fetch(torch.arange(1), torch.Generator())


def test_an_image_of_absurd_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may announce more pixels than there is memory."""
    write_set(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="decompression bomb"):
        folders(tmp_path).train.fetch(torch.arange(1), torch.Generator())


def flat(directory: Path) -> None:
    write_image(directory / "train" / "ant" / "0.png")
    write_image(directory / "val" / "ILSVRC2012_val_00000001.png")


def another_class(directory: Path) -> None:
    write_set(directory)
    write_image(directory / "val" / "dog" / "0.png")


def no_classes(directory: Path) -> None:
    (directory / "train").mkdir()
    (directory / "val").mkdir()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (flat, "val holds no images in class folders"),
        (another_class, "val holds the class folder dog"),
        (no_classes, "train holds no class folders"),
    ],
)
def test_trees_of_another_shape_are_refused(tmp_path: Path, make, sentence: str) -> None:
    """ImageNet's own archive of validation images has no class folders, for example."""
    make(tmp_path)
    with pytest.raises(DataError, match=sentence):
        load_data("imagenet", tmp_path)


def test_without_pillow_a_sentence_tells_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an optional dependency."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        load_data("folders", tmp_path)
