"""The beginning of a source, for a quick try."""

import torch
from torch import Tensor

from spardl.errors import ConfigError
from spardl.train.source import Batch, Source, Stream, shares, shuffled


def first(source: Source, count: int) -> Source:
    """Its first `count` examples, or tokens of a stream, as a source of their own."""
    if count > len(source):
        raise ConfigError(f"there are only {len(source):,} training examples, not {count:,}; make the subset smaller.")
    if isinstance(source, Stream):
        return Stream(source.tokens[: count + 1], source.window)
    return _First(source, count)


class _First:
    """Of independent examples, numbered from 0."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        return shuffled(self._count, workers, batch_size, seed=seed, epoch=epoch)

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        return shares(self._count, rank, workers, batch_size)

    def fetch(self, positions: Tensor, generator: torch.Generator) -> Batch:
        return self._source.fetch(positions, generator)
