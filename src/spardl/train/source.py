"""Where examples come from, and how the ranks of a run share them.

A source hands out batches by position, so that the order of an epoch is a plain tensor that every rank can compute, and
a run can be continued in the middle of one. Everything random depends on the seed, the epoch, the step and the rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spardl.errors import ConfigError, DataError

Batch = tuple[Tensor, ...]
Augmentation = Callable[[Batch, torch.Generator], Batch]

IGNORED = -100  # a label that no loss and no metric counts
TEST_STREAMS = 16


class Source(Protocol):
    """Examples in some form. Ranks that ask alike are answered alike."""

    def __len__(self) -> int: ...

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        """Positions of one epoch: steps x workers x batch size. Full steps only, no position twice."""
        ...

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        """Positions of this rank's share of everything, in batches: all ranks' shares are the whole, each once."""
        ...

    def fetch(self, positions: Tensor, generator: torch.Generator) -> Batch:
        """The examples at these positions, as tensors with the batch as first dimension."""
        ...


class Examples:
    """Independent examples in memory: columns of equal length, shuffled anew in every epoch.

    `augment` changes a batch at random, in training; leave it out for a test set. `prepare` turns what is stored (say,
    bytes) into what a model takes (say, normalised floats), always.
    """

    def __init__(
        self, *columns: Tensor, prepare: Callable[[Batch], Batch] | None = None, augment: Augmentation | None = None
    ) -> None:
        if len({len(column) for column in columns}) != 1:
            raise DataError(f"columns of {[len(column) for column in columns]} examples do not belong together.")
        self.columns = columns
        self._prepare = prepare
        self._augment = augment

    def __len__(self) -> int:
        return len(self.columns[0])

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        return shuffled(len(self), workers, batch_size, seed=seed, epoch=epoch)

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        return shares(len(self), rank, workers, batch_size)

    def fetch(self, positions: Tensor, generator: torch.Generator) -> Batch:
        batch: Batch = tuple(column[positions] for column in self.columns)
        if self._prepare is not None:
            batch = self._prepare(batch)
        return self._augment(batch, generator) if self._augment is not None else batch


class Stream:
    """One long sequence of tokens, read in windows of `window` by parallel readers that each go on where they stopped.

    A batch is (inputs, targets), each batch size x window; targets are the tokens that follow. A position is a place
    in the sequence, so a model may carry its state from one step to the next. Order does not depend on the epoch.
    """

    def __init__(self, tokens: Tensor, window: int) -> None:
        self.tokens = tokens
        self.window = window

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        readers = workers * batch_size
        steps = len(self) // readers // self.window
        _check_steps(steps, len(self), workers, batch_size, f"windows of {self.window} tokens")
        starts = torch.arange(readers) * (len(self) // readers)
        return (starts + torch.arange(steps)[:, None] * self.window).view(steps, workers, batch_size)

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        """A fixed number of readers, dealt to the ranks: what is measured does not depend on their number."""
        windows = -(-len(self) // (TEST_STREAMS * self.window))
        starts = (torch.arange(TEST_STREAMS) * windows * self.window)[rank::workers]
        return [starts + window * self.window for window in range(windows)] if len(starts) else []

    def fetch(self, positions: Tensor, generator: torch.Generator) -> Batch:
        """Windows of tokens and of their successors from these positions on; beyond the end, targets are ignored."""
        places = positions[:, None] + torch.arange(self.window)
        inputs = self.tokens[places.clamp(max=len(self) - 1)]
        targets = self.tokens[(places + 1).clamp(max=len(self))]
        return inputs, torch.where(places < len(self), targets, IGNORED)


class Windows(Stream):
    """One long sequence of tokens in independent windows of `window`, side by side; batches are those of a stream.

    Each epoch cuts the sequence from an offset of its own and shuffles the windows. To test, it is cut from its start:
    each token but the first is a target once.
    """

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        count = (len(self) - self.window + 1) // self.window  # fit, whatever the offset
        offset = int(torch.randint(self.window, (), generator=generator_of(seed, epoch)))
        return offset + self.window * shuffled(count, workers, batch_size, seed=seed, epoch=epoch, what="windows")

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        count = -(-len(self) // self.window)
        return [self.window * positions for positions in shares(count, rank, workers, batch_size)]


def shuffled(count: int, workers: int, batch_size: int, *, seed: int, epoch: int, what: str = "examples") -> Tensor:
    """All positions in an order that depends on seed and epoch alone, dealt into steps x workers x batch size."""
    steps = count // (workers * batch_size)
    _check_steps(steps, count, workers, batch_size, what)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[: steps * workers * batch_size].view(steps, workers, batch_size)


def shares(count: int, rank: int, workers: int, batch_size: int) -> list[Tensor]:
    """Every `workers`-th position from `rank` on, in batches."""
    positions = torch.arange(count)[rank::workers]
    return list(positions.split(batch_size)) if len(positions) else []


def batches(
    source: Source, positions: Sequence[Tensor] | Tensor, *, seeds: Sequence[int], first: int = 0, loaders: int = 0
) -> Iterator[Batch]:
    """Fetch batch after batch, from number `first` on, with so many loading processes.

    `seeds` and the number of a batch decide what is random in it, so neither the loaders nor a start in the middle
    change anything.
    """
    work = _Numbered(source, positions, tuple(seeds), first)
    loader: DataLoader[Batch] = DataLoader(work, batch_size=None, num_workers=loaders, persistent_workers=False)
    loaded = iter(loader)
    while True:
        try:
            batch = next(loaded)
        except StopIteration:
            return
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a process that loads data has ended by itself ({str(error).splitlines()[0].rstrip('.')}); it may have"
                " run out of memory: use fewer --loaders, or 0 to load without processes."
            ) from error
        yield batch


def generator_of(*seeds: int) -> torch.Generator:
    """A generator that differs for different seeds, however close."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 6364136223846793005 + seed + 1442695040888963407) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


class _Numbered(Dataset[Batch]):
    def __init__(self, source: Source, positions: Sequence[Tensor] | Tensor, seeds: tuple[int, ...], first: int):
        self._source, self._positions, self._seeds, self._first = source, positions, seeds, first

    def __len__(self) -> int:
        return max(0, len(self._positions) - self._first)

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        number = self._first + index
        return self._source.fetch(self._positions[number], generator_of(*self._seeds, number))


def _check_steps(steps: int, count: int, workers: int, batch_size: int, what: str) -> None:
    if steps == 0:
        most = count // workers
        advice = f"use a batch size of at most {most}" if most else "use fewer workers"
        raise ConfigError(
            f"{count:,} training {what} do not fill one step of {workers} workers with {batch_size} each; {advice}."
        )
