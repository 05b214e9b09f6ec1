"""Data sets in memory, and how the ranks of a run share them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.errors import ConfigError

# The same split in every run: --seed changes the training, not what it is judged by.
SPLIT_SEED = 20240513
TEST_SHARE = 5


@dataclass(frozen=True)
class Examples:
    """Inputs and their labels."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, positions: Tensor) -> "Examples":
        return Examples(self.inputs[positions], self.labels[positions])

    def shard(self, rank: int, workers: int) -> "Examples":
        """Every `workers`-th example from `rank` on: the shards of all ranks are the whole, each example once."""
        return Examples(self.inputs[rank::workers], self.labels[rank::workers])

    def in_batches(self, size: int) -> Iterator["Examples"]:
        for inputs, labels in zip(self.inputs.split(size), self.labels.split(size), strict=True):
            yield Examples(inputs, labels)


@dataclass(frozen=True)
class DataSet:
    """What a recipe learns from and what it is judged by."""

    train: Examples
    test: Examples

    def steps_per_epoch(self, workers: int, batch_size: int) -> int:
        """Full steps only: with equal batches, the average over ranks is the average over examples."""
        steps = len(self.train) // (workers * batch_size)
        if steps == 0:
            raise ConfigError(
                f"{len(self.train)} training examples do not fill one step of {workers} workers with {batch_size} each;"
                f" use a batch size of at most {len(self.train) // workers}."
                if len(self.train) >= workers
                else f"{len(self.train)} training examples are too few for {workers} workers; use fewer."
            )
        return steps

    def batches(self, rank: int, workers: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[Examples]:
        """This rank's batches of one epoch. All ranks shuffle alike, so no example is used twice in an epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=generator)
        steps = self.steps_per_epoch(workers, batch_size)
        shares = order[: steps * workers * batch_size].view(steps, workers, batch_size)
        for positions in shares[:, rank]:
            yield self.train.pick(positions)


def digits() -> DataSet:
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; one in five is kept for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("the digits come with scikit-learn; install it with: pip install 'spardl[train]'") from error
    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    everything = Examples(inputs, labels)
    cut = len(labels) // TEST_SHARE
    return DataSet(train=everything.pick(order[cut:]), test=everything.pick(order[:cut]))
