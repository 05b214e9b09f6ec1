"""CIFAR in both official formats."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from spardl.errors import DataError
from spardl.train.data.cifar import BLACK, MEAN, STD, cifar10, cifar100, normalise, shift_and_flip
from spardl.train.source import Examples, batches

Labelled = tuple[np.ndarray, np.ndarray]
TOTAL = (50_000, 10_000)


def images(count: int, classes: int, seed: int = 0) -> Labelled:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3072), np.uint8), np.arange(count) % classes


def write_binary(path: Path, labelled: Labelled, coarse: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels, labels = labelled
    columns = [labels[:, None].astype(np.uint8), pixels]
    if coarse:
        columns.insert(0, np.full((len(labels), 1), 19, np.uint8))
    path.write_bytes(np.concatenate(columns, axis=1).tobytes())


def write_python(path: Path, labelled: Labelled, field: bytes = b"labels", protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels, labels = labelled
    table = {b"batch_label": b"training batch", field: labels.tolist(), b"data": pixels, b"filenames": [b"a.png"]}
    path.write_bytes(pickle.dumps(table, protocol=protocol))


def binary_set(folder: Path, train: int = 20, test: int = 10) -> None:
    write_binary(folder / "data_batch_1.bin", images(train, 10, 1))
    write_binary(folder / "test_batch.bin", images(test, 10, 2))


def python_set(folder: Path, train: int = 20, test: int = 10) -> None:
    write_python(folder / "data_batch_1", images(train, 10, 1))
    write_python(folder / "test_batch", images(test, 10, 2))


@pytest.mark.parametrize("place", [".", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_binary_files_are_found_in_all_usual_places(tmp_path: Path, place: str) -> None:
    """Whether the archive was unpacked here, one level up, or into a folder of its own."""
    binary_set(tmp_path / place)
    data = cifar10(tmp_path)
    assert (len(data.train), len(data.test)) == (20, 10)
    assert data.facts == {"classes": 10, "channels": 3}
    assert data.note == "a subset: 20 of 50,000 training images and 10 of 10,000 test images"


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_both_formats_give_the_same_images(tmp_path: Path, protocol: int) -> None:
    """Red, green and blue planes, row by row; pickles of the official protocol, 2, and later ones."""
    binary_set(tmp_path / "one")
    for file, count, seed in (("data_batch_1", 20, 1), ("test_batch", 10, 2)):
        write_python(tmp_path / "two" / file, images(count, 10, seed), protocol=protocol)
    for one, two in zip(cifar10(tmp_path / "one").train.columns, cifar10(tmp_path / "two").train.columns, strict=True):
        assert torch.equal(one, two)
    assert cifar10(tmp_path / "one").train.columns[0].shape == (20, 3, 32, 32)


def test_all_batches_are_joined_in_their_order(tmp_path: Path) -> None:
    """Five files make one training set; missing ones make a subset."""
    for number in (1, 2, 4):
        write_binary(tmp_path / f"data_batch_{number}.bin", (images(3, 10, number)[0], np.full(3, number)))
    write_binary(tmp_path / "test_batch.bin", images(2, 10))
    assert cifar10(tmp_path).train.columns[1].tolist() == [1, 1, 1, 2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize(("binary", "python", "taken"), [(20, 30, 30), (30, 20, 30), (25, 25, 25)])
def test_of_two_formats_the_one_with_more_images_is_taken(tmp_path: Path, binary: int, python: int, taken: int) -> None:
    """A sample in one format does not hide the set in the other."""
    binary_set(tmp_path / "cifar-10-batches-bin", binary)
    python_set(tmp_path / "cifar-10-batches-py", python)
    assert len(cifar10(tmp_path).train) == taken


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar100_goes_by_fine_labels(tmp_path: Path, kind: str) -> None:
    """A hundred classes, not the twenty groups of them."""
    for split, count in (("train", 200), ("test", 100)):
        if kind == "binary":
            write_binary(tmp_path / "cifar-100-binary" / f"{split}.bin", images(count, 100), coarse=True)
        else:
            write_python(tmp_path / "cifar-100-python" / split, images(count, 100), field=b"fine_labels")
    data = cifar100(tmp_path)
    assert data.facts["classes"] == 100
    assert data.train.columns[1].tolist() == list(range(100)) * 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def strange_label(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] = 10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "61,453 bytes, which is no whole number of records of 3,073"),
        (empty, "0 bytes"),
        (strange_label, "labels image 0 as 10, but there are classes 0 to 9"),
    ],
)
def test_damaged_binary_files_are_named(tmp_path: Path, damage: Callable[[Path], None], sentence: str) -> None:
    """The sentence says which file, what was expected and what was found."""
    binary_set(tmp_path)
    damage(tmp_path / "data_batch_1.bin")
    with pytest.raises(DataError, match=f"data_batch_1.bin.*{sentence}"):
        cifar10(tmp_path)


def test_a_set_without_its_test_file_is_refused(tmp_path: Path) -> None:
    """The name of the missing file is told."""
    binary_set(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"not test_batch\.bin"):
        cifar10(tmp_path)


class Malice:
    """A pickle that would make a file."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.victim,)


def forged(**fields: object) -> bytes:
    table = {b"data": images(2, 10)[0], b"labels": [0, 1]}
    return pickle.dumps({**table, **{name.encode(): value for name, value in fields.items()}}, protocol=2)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a pickle"),
        (b"plain text", "is not a pickle"),
        (forged()[:-100], "is not a pickle"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps({b"data": 1}), "has no fields data and labels"),
        (forged(data=np.zeros((2, 3072), np.float32)), "not of plain bytes"),
        (forged(data=np.array([{}, {}], dtype=object)), "not of plain bytes"),
        (forged(data=np.zeros((2, 1000), np.uint8)), r"shape \(2, 1000\)"),
        (forged(labels=[0]), "for 1 labels"),
        (forged(labels=[0, 1.5]), "for 2 labels"),
        (forged(labels=[0, 10]), "labels image 1 as 10"),
        (forged(labels=np.float64(1)), r"asks for numpy\.?\S*\.scalar"),
    ],
)
def test_foreign_pickles_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    """Only what the official files are made of is read: a dictionary of plain values and byte arrays."""
    python_set(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_1.*{sentence}"):
        cifar10(tmp_path)


def test_nothing_that_a_pickle_asks_for_is_run(tmp_path: Path) -> None:
    """The file is read, not obeyed."""
    python_set(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(forged(labels=Malice(tmp_path / "made")))
    with pytest.raises(DataError, match="asks for"):
        cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


def test_images_are_normalised_per_channel() -> None:
    """A byte becomes (byte / 255 - mean) / std."""
    pixels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    found, _ = normalise((pixels, torch.zeros(4)))
    torch.testing.assert_close(found * STD + MEAN, pixels / 255)


def test_augmentation_shows_each_image_somewhere_in_a_black_frame_perhaps_mirrored() -> None:
    """Every result is one of the 9 x 9 x 2 that there are, and both axes and mirror images occur."""
    pixels = torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found, _ = shift_and_flip((pixels, torch.zeros(60)), torch.Generator().manual_seed(2))
    framed = BLACK.expand(60, 3, 40, 40).clone()
    framed[:, :, 4:36, 4:36] = pixels
    seen = set()
    for one, frame in zip(found, framed, strict=True):
        places = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if torch.equal(one.flip(2) if mirrored else one, frame[:, top : top + 32, left : left + 32])
        ]
        assert len(places) == 1
        seen.update(places)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_training_images_change_and_test_images_do_not(tmp_path: Path) -> None:
    """What is random hangs on the seeds alone."""
    binary_set(tmp_path)
    data = cifar10(tmp_path)

    def first(source: Examples, seed: int) -> torch.Tensor:
        return next(iter(batches(source, [torch.arange(5)], seeds=(seed,))))[0]

    assert torch.equal(first(data.train, 1), first(data.train, 1))
    assert not torch.equal(first(data.train, 1), first(data.train, 2))
    assert torch.equal(first(data.test, 1), first(data.test, 2))


@pytest.mark.parametrize("real", ["cifar10"], indirect=True)
def test_the_real_cifar10_loads(real: Path) -> None:
    """Whole or not, classes are even and pixels have the official mean and spread."""
    data = cifar10(real)
    pixels, labels = data.test.fetch(torch.arange(2000), torch.Generator())
    assert torch.bincount(data.test.columns[1]).unique().numel() == 1
    assert labels.unique().numel() == 10
    assert abs(float(pixels.mean())) < 0.05 and abs(float(pixels.std()) - 1) < 0.05
    whole = (len(data.train), len(data.test)) == TOTAL
    assert data.note == "" if whole else data.note.startswith("a subset: ")


@pytest.mark.parametrize("real", ["cifar10/cifar-10-batches-py", "cifar100/cifar-100-python"], indirect=True)
def test_real_pickles_pass_the_strict_reader(real: Path) -> None:
    """What the official files need is allowed."""
    for folder, load in (("cifar10/cifar-10-batches-py", cifar10), ("cifar100/cifar-100-python", cifar100)):
        data = load(real / folder)
        assert len(data.train) >= 500 and data.train.columns[0].shape[1:] == (3, 32, 32)


@pytest.mark.parametrize("real", ["cifar100"], indirect=True)
def test_the_real_cifar100_loads(real: Path) -> None:
    """All hundred classes occur."""
    assert cifar100(real).train.columns[1].unique().numel() == 100
