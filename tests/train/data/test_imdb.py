"""Film reviews from the official folder or archive."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from spardl.errors import DataError
from spardl.train.data import imdb as module
from spardl.train.data.imdb import imdb
from spardl.train.source import batches

REVIEWS = {
    "aclImdb/train/pos/0_9.txt": b"A great film.<br /><br />GREAT, really great!",
    "aclImdb/train/pos/10_7.txt": b"It's a film",
    "aclImdb/train/neg/2_1.txt": b"a bad film... don't",
    "aclImdb/test/pos/0_10.txt": "great caf\u00e9 film".encode(),
    "aclImdb/test/neg/1_2.txt": b"!?",
}
OTHERS = {
    "aclImdb/train/unsup/0_0.txt": b"never to be read",
    "aclImdb/train/pos/notes.txt": b"never to be read",
    "aclImdb/README": b"never to be read",
    "other/train/pos/5_9.txt": b"never to be read",
}


def write_folder(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_archive(path: Path, files: Mapping[str, bytes], compression: str = "gz") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, f"w:{compression}") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def everything(directory: Path) -> list[list[list[int]]]:
    data = imdb(directory)
    return [[column.tolist() for column in part.columns] for part in (data.train, data.test)]


def test_words_are_numbered_by_how_often_training_uses_them(tmp_path: Path) -> None:
    """Lower case, line breaks dropped, ties by the alphabet; what training does not know shares 0 with the filling."""
    write_folder(tmp_path, {**REVIEWS, **OTHERS})
    data = imdb(tmp_path)
    # a 3, film 3, great 3, then once each: bad, don't, it's, really
    assert data.train.columns[0].tolist() == [[1, 4, 2, 5, 0, 0], [1, 3, 2, 3, 7, 3], [6, 1, 2, 0, 0, 0]]
    assert data.train.columns[1].tolist() == [4, 6, 3]
    assert data.train.columns[2].tolist() == [0, 1, 1]
    assert data.test.columns[0].tolist() == [[0, 0, 0], [3, 0, 2]]
    assert data.test.columns[1].tolist() == [1, 3], "a review without words is one unknown word"
    assert data.facts == {"classes": 2, "vocabulary": 50_001}
    assert data.note == "a subset: 3 of 25,000 training reviews and 2 of 25,000 test reviews"


@pytest.mark.parametrize(
    ("file", "compression"),
    [
        ("aclImdb_v1.tar.gz", "gz"),
        ("imdb/aclImdb_v1_labelled.tar.xz", "xz"),
        ("aclImdb.tar.bz2", "bz2"),
        ("aclImdb.tar", ""),
    ],
)
def test_an_archive_gives_what_its_folder_gives(tmp_path: Path, file: str, compression: str) -> None:
    """In whatever order its members come, and nothing is written beside it."""
    write_folder(tmp_path / "folder", {**REVIEWS, **OTHERS})
    mixed = dict(reversed([*OTHERS.items(), *REVIEWS.items()]))
    write_archive(tmp_path / "archive" / file, mixed, compression)
    assert everything(tmp_path / "archive") == everything(tmp_path / "folder")
    assert [path.name for path in (tmp_path / "archive").rglob("*") if path.is_file()] == [Path(file).name]


def test_a_batch_is_as_wide_as_its_longest_review(tmp_path: Path) -> None:
    """(tokens, lengths, labels), tokens as int64."""
    write_folder(tmp_path, REVIEWS)
    (batch,) = batches(imdb(tmp_path).train, [torch.tensor([0, 2])], seeds=(0,))
    tokens, lengths, labels = batch
    assert tokens.dtype == torch.int64 and tokens.shape == (2, 4)
    assert lengths.tolist() == [4, 3] and labels.tolist() == [0, 1]


def test_reviews_are_cut(tmp_path: Path) -> None:
    """After 500 words, or as many as are asked for."""
    write_folder(tmp_path, {**REVIEWS, "aclImdb/test/pos/3_8.txt": b"great " * 700})
    assert imdb(tmp_path).test.columns[1].tolist() == [1, 3, 500]
    assert imdb(tmp_path, window=2).test.columns[0].tolist() == [[0, 0], [3, 0], [3, 3]]


def test_what_was_parsed_once_is_kept_until_the_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run does not parse; another archive under the same name is parsed again."""
    path = tmp_path / "aclImdb_v1.tar.gz"
    write_archive(path, REVIEWS)
    before = everything(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_parse", lambda *_: pytest.fail("parsed again"))
        assert everything(tmp_path) == before
    write_archive(path, {**REVIEWS, "aclImdb/train/pos/3_8.txt": b"great"})
    assert len(imdb(tmp_path).train) == 4


def link(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in REVIEWS:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.write_bytes(b"not a tar"), "not a tar archive, or damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "damaged or cut off"),
        (lambda path: write_archive(path, OTHERS), "0 training and 0 test reviews with official names"),
        (link, "0 training and 0 test reviews"),
        (lambda path: write_archive(path, {**REVIEWS, "aclImdb/test/neg/4_1.txt": b"caf\xe9"}), "0xe9"),
        (lambda path: write_archive(path, {**REVIEWS, "aclImdb/test/neg/4_1.txt": b"a" * 2_000_000}), "1,048,576"),
    ],
)
def test_damaged_and_foreign_archives_are_refused(tmp_path: Path, damage, sentence: str) -> None:
    """Named, with the member where one is to blame. Links are not followed."""
    path = tmp_path / "aclImdb_v1.tar.gz"
    write_archive(path, REVIEWS)
    damage(path)
    with pytest.raises(DataError, match=sentence) as caught:
        imdb(tmp_path)
    assert "aclImdb_v1.tar.gz" in str(caught.value)


@pytest.mark.parametrize("real", ["imdb"], indirect=True)
def test_the_real_reviews_fill_the_vocabulary(real: Path) -> None:
    """25,000 each, half of them good, and every word number up to 50,000 is used."""
    data = imdb(real)
    assert (len(data.train), len(data.test), data.note) == (25_000, 25_000, "")
    tokens, lengths, labels = data.train.columns
    assert labels.sum() == 12_500 and data.test.columns[2].sum() == 12_500
    assert int(lengths.max()) == 500 and int(lengths.min()) > 5
    assert int(tokens.max()) == 50_000 and len(np.unique(tokens.numpy())) > 49_000
