"""The ranks of a run share a data set fairly and reproducibly."""

import pytest
import torch

from spardl.errors import ConfigError
from spardl.train.data import DataSet, Examples, digits


def numbered(count: int) -> DataSet:
    """Examples that are their own number, so that a test sees which one it got."""
    examples = Examples(torch.arange(count, dtype=torch.float32), torch.arange(count))
    return DataSet(train=examples, test=examples)


def epoch_of(data: DataSet, workers: int, batch_size: int, *, seed: int = 0, epoch: int = 0) -> list[list[list[int]]]:
    """Labels by rank, step and position."""
    return [
        [batch.labels.tolist() for batch in data.batches(rank, workers, batch_size, seed=seed, epoch=epoch)]
        for rank in range(workers)
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_no_example_is_used_twice_in_an_epoch(workers: int) -> None:
    """Ranks draw from one shuffling, each its own part of every step."""
    drawn = [label for rank in epoch_of(numbered(103), workers, 4) for batch in rank for label in batch]
    assert len(drawn) == len(set(drawn)) == 103 // (4 * workers) * 4 * workers


def test_every_rank_has_equally_many_full_batches() -> None:
    """A rank with one batch more would wait for the others forever."""
    ranks = epoch_of(numbered(50), 3, 4)
    assert [[len(batch) for batch in rank] for rank in ranks] == [[4, 4, 4, 4]] * 3


def test_epochs_and_seeds_shuffle_differently_and_reproducibly() -> None:
    """The order depends on seed and epoch, and on nothing else."""
    data = numbered(40)
    assert epoch_of(data, 2, 5, seed=1, epoch=2) == epoch_of(data, 2, 5, seed=1, epoch=2)
    assert epoch_of(data, 2, 5, seed=1, epoch=2) != epoch_of(data, 2, 5, seed=1, epoch=3)
    assert epoch_of(data, 2, 5, seed=1, epoch=2) != epoch_of(data, 2, 5, seed=2, epoch=2)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 60])
def test_the_test_shards_are_the_whole_test_set(workers: int) -> None:
    """Each example is tested once, even if some ranks have one more, or none."""
    examples = numbered(50).test
    shards = [examples.shard(rank, workers).labels for rank in range(workers)]
    assert sorted(torch.cat(shards).tolist()) == list(range(50))


@pytest.mark.parametrize(("workers", "batch_size"), [(2, 26), (60, 1)])
def test_batches_that_the_data_cannot_fill_are_refused(workers: int, batch_size: int) -> None:
    """An epoch without a step would train nothing and say nothing."""
    with pytest.raises(ConfigError, match="50 training examples"):
        numbered(50).steps_per_epoch(workers, batch_size)


def test_digits_come_with_the_installation() -> None:
    """1,797 images of 8 x 8 with values in [0, 1]; test and training do not overlap, and the split never changes."""
    data = digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.train.inputs.shape[1:] == (1, 8, 8)
    assert (float(data.train.inputs.min()), float(data.train.inputs.max())) == (0.0, 1.0)
    assert torch.equal(data.test.labels, digits().test.labels)
    assert set(data.test.labels.tolist()) == set(range(10))
