"""A part of a source, for a quick try."""

import torch
from torch import Tensor

from spardl.errors import ConfigError
from spardl.train.source import Batch, Source, Stream, shares, shuffled


def part_of(source: Source, count: int) -> Source:
    """`count` examples, evenly spread, for many sets come class by class; or the first tokens of a stream."""
    if count > len(source):
        raise ConfigError(f"there are only {len(source):,} training examples, not {count:,}; make the subset smaller.")
    if isinstance(source, Stream):
        return type(source)(source.tokens[: count + 1], source.window)
    return _Spread(source, count)


class _Spread:
    """A source of `count` independent examples of another one, evenly spread over it and numbered from 0."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._chosen = torch.arange(count) * len(source) // count

    def __len__(self) -> int:
        return len(self._chosen)

    def order(self, workers: int, batch_size: int, *, seed: int, epoch: int) -> Tensor:
        return shuffled(len(self), workers, batch_size, seed=seed, epoch=epoch)

    def sweep(self, rank: int, workers: int, batch_size: int) -> list[Tensor]:
        return shares(len(self), rank, workers, batch_size)

    def fetch(self, positions: Tensor, generator: torch.Generator) -> Batch:
        return self._source.fetch(self._chosen[positions], generator)
