"""MovieLens: the latest rating of each user is the test."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.errors import ConfigError, DataError
from spardl.train.data import load_data
from spardl.train.data.movielens import Rated, draw_others, ml_latest_small
from spardl.train.source import IGNORED, batches

# user, item, rating, time: user 7 rated 20 last, although 30 comes last in the file; user 9's times are equal.
RATINGS = [
    (7, 10, 4, 100),
    (7, 20, 3, 300),
    (9, 40, 5, 500),
    (9, 10, 2, 500),
    (7, 30, 1, 200),
    (8, 50, 5, 50),
]

FORMATS: dict[str, tuple[str, Callable[[tuple[int, ...]], str], str]] = {
    "ml-latest-small": (
        "ratings.csv",
        lambda r: f"{r[0]},{r[1]},{r[2]}.5,{r[3]}\r\n",
        "userId,movieId,rating,timestamp\r\n",
    ),
    "ml-20m": ("ratings.csv", lambda r: f"{r[0]},{r[1]},{r[2]}.5,{r[3]}\n", "userId,movieId,rating,timestamp\n"),
    "ml-100k": ("u.data", lambda r: "\t".join(map(str, r)) + "\n", ""),
    "ml-1m": ("ratings.dat", lambda r: "::".join(map(str, r)) + "\n", ""),
}


def write(directory: Path, name: str, ratings: list[tuple[int, ...]]) -> Path:
    file, line, header = FORMATS[name]
    path = directory / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((header + "".join(map(line, ratings))).encode())
    return path


def many(users: int = 30, items: int = 60, seed: int = 0) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(seed)
    return [
        (user, int(item), 3, int(generator.integers(1000)))
        for user in range(users)
        for item in generator.choice(items, generator.integers(2, 20), replace=False)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_the_latest_rating_of_each_user_is_kept_for_the_test(tmp_path: Path, name: str) -> None:
    """Of equal times the last in the file; a user with a single rating is not tested."""
    write(tmp_path, name, RATINGS)
    data = load_data(name, tmp_path)
    assert data.facts == {"users": 3, "items": 5}
    learned = list(zip(*(column.tolist() for column in data.train.columns), strict=True))
    assert sorted(learned) == [(0, 0), (0, 2), (1, 4), (2, 3)]
    users, candidates = data.test.fetch(torch.arange(2), torch.Generator())
    assert users.tolist() == [0, 2] and candidates[:, 0].tolist() == [1, 0]
    assert data.note.startswith("a subset: 6 of ")
    assert len(load_data(name, tmp_path / name).train) == 4


def test_the_same_item_twice_counts_once(tmp_path: Path) -> None:
    """What is asked in the test was not learned: of two ratings of an item, the later one stays."""
    write(tmp_path, "ml-100k", [*RATINGS, (7, 10, 1, 900)])
    data = load_data("ml-100k", tmp_path)
    learned = list(zip(*(column.tolist() for column in data.train.columns), strict=True))
    assert (0, 0) not in learned and (0, 1) in learned
    assert data.test.columns[1][0, 0] == 0


def test_negatives_are_never_what_the_user_rated_in_training(tmp_path: Path) -> None:
    """To each rating four others, drawn anew for each batch; labels say which is which."""
    write(tmp_path, "ml-1m", many())
    data = load_data("ml-1m", tmp_path)
    known = set(zip(*(column.tolist() for column in data.train.columns), strict=True))
    positions = torch.arange(len(data.train))
    drawn = [data.train.fetch(positions, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0][1], drawn[1][1]) and not torch.equal(drawn[0][1], drawn[2][1])
    users, items, labels = drawn[0]
    assert users.shape == items.shape == labels.shape == (5 * len(data.train),)
    for user, item, label in zip(users.tolist(), items.tolist(), labels.tolist(), strict=True):
        assert ((user, item) in known) == (label == 1)
    assert labels.view(-1, 5).sum(dim=1).tolist() == [1] * len(data.train)
    assert load_data("ml-1m", tmp_path, negatives=2).train.fetch(positions, torch.Generator())[0].shape == (
        3 * len(data.train),
    )


def test_test_candidates_are_different_fixed_and_unrated(tmp_path: Path) -> None:
    """As many as asked for, or as there are; -100 fills up."""
    ratings = many()
    write(tmp_path, "ml-100k", ratings)
    rated = {(user, item) for user, item, _, _ in ratings}
    films = sorted({item for _, item in rated})
    for wanted in (5, 30, 99):
        data = load_data("ml-100k", tmp_path, candidates=wanted)
        users, candidates = data.test.fetch(torch.arange(30), torch.Generator())
        assert candidates.shape == (30, 1 + wanted)
        for user, (right, *others) in zip(users.tolist(), candidates.tolist(), strict=True):
            found = [films[item] for item in others if item != IGNORED]
            free = [film for film in films if (user, film) not in rated]
            assert (user, films[right]) in rated
            assert len(set(found)) == len(found) == min(wanted, len(free))
            assert set(found) <= set(free)
        assert torch.equal(candidates, load_data("ml-100k", tmp_path, candidates=wanted).test.columns[1])


def test_the_test_can_rank_all_items(tmp_path: Path) -> None:
    """Zero candidates stand for everything that the user never rated."""
    ratings = many()
    write(tmp_path, "ml-100k", ratings)
    rated = {(user, item) for user, item, _, _ in ratings}
    films = sorted({item for _, item in rated})
    data = load_data("ml-100k", tmp_path, candidates=0)
    users, candidates = data.test.fetch(torch.arange(7), torch.Generator())
    for user, (_, *others) in zip(users.tolist(), candidates.tolist(), strict=True):
        found = [films[item] for item in others if item != IGNORED]
        assert found == [film for film in films if (user, film) not in rated]


@pytest.mark.parametrize("workers", [1, 4, 40])
def test_all_users_are_tested_once_by_whatever_number_of_workers(tmp_path: Path, workers: int) -> None:
    """Not only those of a rank's first share."""
    write(tmp_path, "ml-100k", many())
    test = load_data("ml-100k", tmp_path).test
    tested = [
        user
        for rank in range(workers)
        for users, _ in batches(test, test.sweep(rank, workers, 4), seeds=(0,))
        for user in users.tolist()
    ]
    assert sorted(tested) == list(range(30))


@settings(deadline=None)
@given(st.data())
def test_the_numbers_of_unrated_items_count_them_all(data: st.DataObject) -> None:
    """Number k of a user is the k-th item that the user has not rated."""
    items = data.draw(st.integers(1, 12))
    rated = data.draw(st.lists(st.sets(st.integers(0, items - 1)), min_size=1, max_size=5))
    pairs = [(user, item) for user, some in enumerate(rated) for item in some]
    columns = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    table = Rated(columns[0], columns[1], len(rated), items)
    for user, some in enumerate(rated):
        free = [item for item in range(items) if item not in some]
        assert int(table.unrated[user]) == len(free)
        numbers = torch.arange(len(free))
        assert table.unrated_items(torch.full_like(numbers, user), numbers).tolist() == free


def test_candidates_are_drawn_with_equal_chances() -> None:
    """Each of ten items comes up in three of ten draws."""
    users = torch.zeros(20_000, dtype=torch.int64)
    rated = Rated(torch.tensor([0, 0]), torch.tensor([3, 7]), 1, 12)
    drawn = draw_others(users, rated, 3, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn.flatten(), minlength=12) / len(users)
    assert shares[3] == shares[7] == 0
    assert all(abs(float(share) - 0.3) < 0.02 for item, share in enumerate(shares) if item not in (3, 7))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("ml-20m", b"", "starts with '', not with 'userId,movieId"),
        ("ml-20m", b"user,film\n1,2\n", "starts with 'user,film'"),
        ("ml-20m", b"userId,movieId,rating,timestamp\n", "holds no ratings"),
        ("ml-20m", b"userId,movieId,rating,timestamp\n1,2,3.0,4\n1,2", "damaged or another file"),
        ("ml-20m", b"userId,movieId,rating,timestamp\n1,two,3.0,4\n", "could not convert string 'two'"),
        ("ml-100k", b"1,2,3,4\n", r"separated by '\\t'"),
        ("ml-100k", b"\x1f\x8b\xff\n", "damaged or another file"),
        ("ml-1m", b"1::2::3\n", "damaged or another file"),
        ("ml-100k", b"1\t2\t3\t4\n2\t3\t3\t4\n", "no user with two ratings"),
        ("ml-100k", b"1\t2\t3\t4\n1\t3\t3\t4\n", "user 1 .* has rated all 2 items"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    """The sentence says which file, what was expected and what was found."""
    path = write(tmp_path, name, [])
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        load_data(name, tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("options", [{"negatives": -1}, {"candidates": -1}])
def test_fewer_items_than_none_cannot_be_drawn(tmp_path: Path, options: dict[str, int]) -> None:
    """The sentence names the number."""
    with pytest.raises(ConfigError, match="-1 items"):
        load_data("ml-100k", tmp_path, **options)


@pytest.mark.parametrize("real", ["ml-latest-small"], indirect=True)
def test_the_real_small_set_has_the_published_counts(real: Path) -> None:
    """Every user is tested."""
    data = ml_latest_small(real)
    assert data.facts == {"users": 610, "items": 9_724}
    assert (len(data.train), len(data.test), data.note) == (100_836 - 610, 610, "")
