"""MovieLens: which film a user rates next, told from films that the user never rated.

Harper and Konstan, "The MovieLens datasets", 2015; the task is that of He et al., "Neural collaborative filtering",
2017: the latest rating of each user is kept for the test, and how good a rating was does not matter.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.errors import ConfigError, DataError
from spardl.train.data.files import missing, places, reading
from spardl.train.dataset import DataSet
from spardl.train.source import IGNORED, Batch, Examples
from spardl.train.tasks import Ranking

CSV_HEADER = "userId,movieId,rating,timestamp"
TEST_SEED = 20240513

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Format:
    """A file with user, item, rating and time in each line."""

    file: str
    separator: str
    header: str
    ratings: int  # of the official file


def ml_latest_small(directory: Path | None = None, negatives: int = 4, candidates: int = 99) -> DataSet:
    """610 users and 9,724 films."""
    return _load("ml-latest-small", directory, Format("ratings.csv", ",", CSV_HEADER, 100_836), negatives, candidates)


def ml_100k(directory: Path | None = None, negatives: int = 4, candidates: int = 99) -> DataSet:
    """943 users and 1,682 films."""
    return _load("ml-100k", directory, Format("u.data", "\t", "", 100_000), negatives, candidates)


def ml_1m(directory: Path | None = None, negatives: int = 4, candidates: int = 99) -> DataSet:
    """6,040 users and 3,706 films."""
    return _load("ml-1m", directory, Format("ratings.dat", "::", "", 1_000_209), negatives, candidates)


def ml_20m(directory: Path | None = None, negatives: int = 4, candidates: int = 99) -> DataSet:
    """138,493 users and 26,744 films."""
    return _load("ml-20m", directory, Format("ratings.csv", ",", CSV_HEADER, 20_000_263), negatives, candidates)


class Rated:
    """Which items each user has rated, and so which others there are to draw from."""

    def __init__(self, users: Tensor, items: Tensor, user_count: int, item_count: int) -> None:
        pairs = torch.unique(users * item_count + items)
        owners = pairs // item_count
        counts = torch.bincount(owners, minlength=user_count)
        self.unrated = item_count - counts
        self._first = counts.cumsum(0) - counts
        # How many unrated items lie below each rated one: sorted per user, and over all users by their offsets.
        below = pairs % item_count - (torch.arange(len(pairs)) - self._first[owners])
        self._stride = item_count + 1
        self._below = owners * self._stride + below

    def unrated_items(self, users: Tensor, numbers: Tensor) -> Tensor:
        """The items of these numbers, each from 0 to `unrated[user]` - 1, among those that its user has not rated."""
        keys = (users * self._stride + numbers).contiguous()
        return numbers + torch.searchsorted(self._below, keys, right=True) - self._first[users]


def add_negatives(batch: Batch, generator: torch.Generator, *, rated: Rated, count: int) -> Batch:
    """To each pair of user and item, `count` items that the user has not rated: (users, items, labels).

    All are drawn anew in each batch, with equal chances; a batch of n ratings makes n x (1 + count) pairs.
    """
    users, items = (column.long() for column in batch)
    users = users[:, None].expand(-1, count)
    numbers = torch.rand(users.shape, generator=generator, dtype=torch.float64) * rated.unrated[users]
    pairs = torch.cat([items[:, None], rated.unrated_items(users, numbers.long())], dim=1)
    labels = torch.zeros(pairs.shape)
    labels[:, 0] = 1
    return batch[0].long().repeat_interleave(1 + count), pairs.flatten(), labels.flatten()


def add_all_others(batch: Batch, *, rated: Rated) -> Batch:
    """To each pair of user and item, all items that the user has not rated: (users, candidates)."""
    users, items = (column.long() for column in batch)
    unrated = rated.unrated[users][:, None]
    numbers = torch.arange(int(unrated.max())).expand(len(users), -1)
    others = rated.unrated_items(users[:, None].expand_as(numbers), torch.minimum(numbers, unrated - 1))
    return users, torch.cat([items[:, None], torch.where(numbers < unrated, others, IGNORED)], dim=1)


def draw_others(users: Tensor, rated: Rated, count: int, generator: torch.Generator) -> Tensor:
    """For each user `count` different items that the user has not rated; -100 where there are fewer.

    Floyd's algorithm, for all users at once: Bentley and Floyd, "A sample of brilliance", 1987.
    """
    unrated = rated.unrated[users]
    numbers = torch.full((count, len(users)), -1, dtype=torch.int32)
    for place in range(count):
        last = unrated - count + place
        drawn = (torch.rand(len(users), generator=generator, dtype=torch.float64) * (last + 1)).int()
        taken = torch.zeros(len(users), dtype=torch.bool)
        for earlier in numbers[:place]:
            taken |= earlier == drawn
        numbers[place] = torch.where(last >= 0, torch.where(taken, last, drawn), -1)
    table = numbers.T.long()
    items = rated.unrated_items(users[:, None].expand_as(table), table.clamp(min=0))
    return torch.where(table >= 0, items, IGNORED)


def as_long(batch: Batch) -> Batch:
    return tuple(column.long() for column in batch)


def _load(name: str, directory: Path | None, layout: Format, negatives: int, candidates: int) -> DataSet:
    """Training with `negatives` per rating; the test against `candidates` others, or against all if it is 0."""
    if negatives < 0 or candidates < 0:
        raise ConfigError(f"{min(negatives, candidates)} items cannot be drawn; give 0 or more.")
    path = _find(name, directory, layout.file)
    users, items, times = _read(path, layout).T
    names, users = np.unique(users, return_inverse=True)
    films, items = np.unique(items, return_inverse=True)
    train, test = _leave_one_out(users, items, times, len(films))
    if not len(train) or not len(test):
        raise DataError(f"{path} holds no user with two ratings, one to learn from and one for the test.")
    counts = len(names), len(films)
    everything = Rated(torch.tensor(users), torch.tensor(items), *counts)
    if not everything.unrated.all():
        user = names[int(everything.unrated.argmin())]
        raise DataError(f"user {user} in {path} has rated all {len(films):,} items: there is none to compare with.")
    learned = Rated(torch.tensor(users[train]), torch.tensor(items[train]), *counts)
    return DataSet(
        name=name,
        train=Examples(
            *_columns(users[train], items[train]), augment=partial(add_negatives, rated=learned, count=negatives)
        ),
        test=_test(*_columns(users[test], items[test]), everything, candidates),
        task=Ranking(),
        facts={"users": len(names), "items": len(films)},
        note=f"a subset: {len(users):,} of {layout.ratings:,} ratings" if len(users) < layout.ratings else "",
    )


def _test(users: Tensor, items: Tensor, rated: Rated, candidates: int) -> Examples:
    """Each user's kept item, first among candidates that never change."""
    if candidates == 0:
        return Examples(users, items, prepare=partial(add_all_others, rated=rated))
    others = draw_others(users.long(), rated, candidates, torch.Generator().manual_seed(TEST_SEED))
    return Examples(users, torch.cat([items[:, None], others.int()], dim=1), prepare=as_long)


def _columns(users: Numbers, items: Numbers) -> tuple[Tensor, Tensor]:
    """Half as large as they are computed with: MovieLens-20M is held by every rank."""
    return torch.tensor(users, dtype=torch.int32), torch.tensor(items, dtype=torch.int32)


def _leave_one_out(users: Numbers, items: Numbers, times: Numbers, item_count: int) -> tuple[Numbers, Numbers]:
    """Places of the ratings to learn from, and of each user's latest; of equal times, the last in the file is later.

    A user with one rating is learned from and not tested. Of ratings of the same item, the latest counts.
    """
    order = np.lexsort((times, users))
    backwards = order[::-1]
    _, latest = np.unique((users * item_count + items)[backwards], return_index=True)
    order = backwards[np.sort(latest)][::-1]
    owners = users[order]
    last = np.append(owners[1:] != owners[:-1], True)
    alone = np.append(True, owners[1:] != owners[:-1]) & last
    tested = last & ~alone
    return order[~tested], order[tested]


def _find(name: str, directory: Path | None, file: str) -> Path:
    for folder in places(name, directory):
        if (folder / file).is_file():
            return folder / file
    raise missing(name, directory)


def _read(path: Path, layout: Format) -> Numbers:
    """Users, items and times, a row for each rating."""
    try:
        with reading(path), path.open(encoding="utf-8") as file:
            if layout.header:
                header = file.readline().strip()
                if header != layout.header:
                    raise DataError(f"{path} starts with {header[:60]!r}, not with {layout.header!r}.")
            table = _numbers(file, layout.separator)
    except DataError:
        raise
    except ValueError as error:
        reason = " ".join(str(error).rstrip(".").split())
        raise DataError(
            f"{path} is damaged or another file: its lines are not user, item, rating and time, separated by"
            f" {layout.separator!r} ({reason})."
        ) from error
    if not len(table):
        raise DataError(f"{path} holds no ratings.")
    return table


def _numbers(lines: Iterable[str], separator: str) -> Numbers:
    if separator == "::":  # numpy knows separators of one character only
        return _numbers((line.replace("::", ",") for line in lines), ",")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a file without lines
        table: Numbers = np.loadtxt(
            lines, dtype=np.int64, delimiter=separator, usecols=(0, 1, 3), comments=None, ndmin=2
        )
    return table
