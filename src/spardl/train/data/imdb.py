"""IMDB film reviews, good or bad, from the official folder or straight from its archive.

Maas et al., "Learning word vectors for sentiment analysis", 2011.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.errors import ConfigError, DataError
from spardl.train.data.cache import Arrays, cached
from spardl.train.data.files import decode, missing, places, reading, subset_note
from spardl.train.dataset import DataSet
from spardl.train.source import Batch, Examples
from spardl.train.tasks import Classification

SPLITS = ("train", "test")
OFFICIAL = (25_000, 25_000)

# The most frequent words of the training reviews are 1 to 50,000. All others share 0, which also fills up short texts.
KNOWN_WORDS = 50_000
OTHERS = 0

LARGEST_REVIEW = 1 << 20
MOST_REVIEWS = 1 << 20
FORMAT = 1  # of the cache: count up when the tokens of a review change

OFFICIAL_NAME = re.compile(r"aclImdb/(train|test)/(pos|neg)/(\d+)_(\d+)\.txt")
LINE_BREAK = re.compile(r"<br\s*/?>")
WORD = re.compile(r"\w+(?:'\w+)*")


class Review(NamedTuple):
    """Sorted like this, reviews come in the same order from a folder and from an archive."""

    split: str
    label: int  # 1 is good
    number: int
    rating: int
    content: bytes
    where: str


def imdb(directory: Path | None = None, window: int = 500) -> DataSet:
    """Reviews in lower case, cut to `window` words. A batch is (tokens, lengths, labels), tokens as wide as needed."""
    if window < 1:
        raise ConfigError(f"reviews of {window} words hold nothing; give 1 or more.")
    source = _find(directory)
    arrays = cached("imdb", (FORMAT, KNOWN_WORDS, window, *_fingerprint(source)), partial(_parse, source, window))
    train, test = (_columns(arrays, split) for split in SPLITS)
    return DataSet(
        name="imdb",
        train=Examples(*train, prepare=cut_to_longest),
        test=Examples(*test, prepare=cut_to_longest),
        task=Classification(),
        facts={"classes": 2, "vocabulary": KNOWN_WORDS + 1},
        note=subset_note("reviews", len(train[1]), len(test[1]), OFFICIAL),
    )


def cut_to_longest(batch: Batch) -> Batch:
    """Drop the columns that no review of the batch reaches."""
    tokens, lengths, labels = batch
    return tokens[:, : int(lengths.max())].long(), lengths, labels


def _find(directory: Path | None) -> Path:
    """The folder aclImdb, or else an archive of it."""
    folders = places("imdb", directory)
    for folder in folders:
        for candidate in (folder / "aclImdb", folder):
            if (candidate / "train" / "pos").is_dir():
                return candidate
    archives = [path for folder in folders for path in sorted(folder.glob("aclImdb*.t*")) if path.is_file()]
    if not archives:
        raise missing("imdb", directory)
    return archives[0]


def _fingerprint(source: Path) -> tuple[object, ...]:
    """What changes when the source does."""
    with reading(source):
        states = [entry.stat() for entry in _entries(source)] if source.is_dir() else [source.stat()]
    newest = max((state.st_mtime_ns for state in states), default=0)
    return str(source.resolve()), len(states), sum(state.st_size for state in states), newest


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    for split in SPLITS:
        for opinion in ("pos", "neg"):
            path = folder / split / opinion
            if path.is_dir():
                with os.scandir(path) as entries:
                    yield from entries


def _parse(source: Path, length: int) -> Arrays:
    reviews = sorted(_from_folder(source) if source.is_dir() else _from_archive(source))
    counts = {split: sum(review.split == split for review in reviews) for split in SPLITS}
    if not all(counts.values()):
        raise DataError(
            f"{source} holds {counts['train']:,} training and {counts['test']:,} test reviews with official names, such"
            " as aclImdb/train/pos/0_9.txt; both are needed."
        )
    return _encode(reviews, counts["train"], length)


def _from_folder(folder: Path) -> Iterator[Review]:
    for entry in _entries(folder):
        path = Path(entry.path)
        name = "/".join(("aclImdb", *path.parts[-3:]))
        if OFFICIAL_NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
            with reading(path), path.open("rb") as file:
                yield _review(name, file.read(LARGEST_REVIEW + 1), str(path))


def _from_archive(archive: Path) -> Iterator[Review]:
    """Reviews in the order of the archive, of any compression, nothing of which is written to disk."""
    try:
        with reading(archive), tarfile.open(archive, mode="r:*") as members:
            for count, member in enumerate(members):
                if count > MOST_REVIEWS:
                    raise DataError(f"{archive} holds more than {MOST_REVIEWS:,} files; it is another archive.")
                if OFFICIAL_NAME.fullmatch(member.name) and member.isreg():
                    file = members.extractfile(member)
                    assert file is not None, "a regular file has content"
                    yield _review(member.name, file.read(LARGEST_REVIEW + 1), f"{member.name} in {archive}")
    except tarfile.TarError as error:
        raise DataError(f"{archive} is not a tar archive, or damaged or cut off ({error}); get it again.") from error


def _review(name: str, content: bytes, where: str) -> Review:
    if len(content) > LARGEST_REVIEW:
        raise DataError(f"{where} has more than {LARGEST_REVIEW:,} bytes, far more than any review.")
    found = OFFICIAL_NAME.fullmatch(name)
    assert found is not None, "only official names come here"
    split, opinion, number, rating = found.groups()
    return Review(split, int(opinion == "pos"), int(number), int(rating), content, where)


def _encode(reviews: list[Review], train_count: int, length: int) -> Arrays:
    """Tokens of all reviews of a split in one row, with their lengths and labels."""
    numbers: dict[str, int] = {}
    texts = [_numbered(review, numbers) for review in reviews]
    # Sorted by split, the test comes before the training.
    training, test = slice(len(reviews) - train_count, None), slice(len(reviews) - train_count)
    tokens = _ranks(list(numbers), np.concatenate(texts[training]))
    arrays: Arrays = {}
    for split, part in (("train", training), ("test", test)):
        # An empty review is one unknown word, so that every text has an end.
        kept = [tokens[text[:length]] if len(text) else np.array([OTHERS], np.uint16) for text in texts[part]]
        arrays[f"{split}_tokens"] = np.concatenate(kept)
        arrays[f"{split}_lengths"] = np.array([len(text) for text in kept], np.int64)
        arrays[f"{split}_labels"] = np.array([review.label for review in reviews[part]], np.int64)
    return arrays


def _numbered(review: Review, numbers: dict[str, int]) -> NDArray[np.int32]:
    """The words of a review, numbered in the order in which each was first seen."""
    text = LINE_BREAK.sub(" ", decode(review.content, review.where).lower())
    return np.array([numbers.setdefault(word, len(numbers)) for word in WORD.findall(text)], np.int32)


def _ranks(words: list[str], training: NDArray[np.int32]) -> NDArray[np.uint16]:
    """For each word its token: 1 for the most frequent in training and so on; ties go by the alphabet."""
    counts = np.bincount(training, minlength=len(words))
    alphabetical = np.argsort(np.argsort(np.array(words)))
    order = np.lexsort((alphabetical, -counts))[:KNOWN_WORDS]
    order = order[counts[order] > 0]
    tokens = np.full(len(words), OTHERS, np.uint16)
    tokens[order] = np.arange(1, len(order) + 1)
    return tokens


def _columns(arrays: Arrays, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens as a table, one row per review, filled up on the right."""
    lengths = arrays[f"{split}_lengths"].astype(np.int64)
    table = np.full((len(lengths), lengths.max()), OTHERS, np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = arrays[f"{split}_tokens"]
    return torch.from_numpy(table), torch.from_numpy(lengths), torch.tensor(arrays[f"{split}_labels"])
