"""What a program may ask about the values in memory without taking any. A poisoned rank answers with zeros."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import download
from spardl.memory.transaction import Transaction
from spardl.sparse import Ints

SAMPLE = 1 << 16


class Survey:
    """Counts, norms and a quantile of one transaction's sums."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def count_above(self, threshold: float) -> int:
        """How many values have magnitude `threshold` or more. One pass, or none where the shortlist reaches so far."""
        self._transaction.add_up()
        return self._transaction.buffer.count_above(threshold)

    def count_bins(self, block: int, first: int, shift: int, bins: int) -> Ints:
        """How many magnitudes of a block lie in each bin of 2**shift float32 bit patterns, from bin `first` up."""
        self._transaction.add_up()
        buffer = self._transaction.buffer
        if self._transaction.health.is_poisoned():
            return np.zeros(bins, np.int64)
        stretch = buffer.values[int(buffer.starts[block]) : int(buffer.starts[block + 1])]
        counts: Ints = buffer.kernels.count_bins(stretch, first, shift, bins)
        return counts

    def magnitude_of(self, target: int) -> float:
        """About the magnitude that `target` entries reach, by a sample of `SAMPLE` values; 0 if poisoned."""
        self._transaction.add_up()
        values = self._transaction.buffer.values
        sample = values[:: max(1, values.numel() // SAMPLE)].abs()
        rank = max(1, round(sample.numel() * target / values.numel()))
        return (
            float(download(torch.topk(sample, rank).values[-1])) if not self._transaction.health.is_poisoned() else 0.0
        )

    def norms(self) -> NDArray[np.float64]:
        """The Euclidean norm of each block."""
        self._transaction.add_up()
        buffer = self._transaction.buffer
        if self._transaction.health.is_poisoned():
            return np.zeros(len(buffer.lengths))
        blocks = buffer.values.split(buffer.lengths.tolist())
        norms = _norms(blocks, torch.float32)
        return norms if np.isfinite(norms).all() else _norms(blocks, torch.float64)


def _norms(blocks: Sequence[Tensor], dtype: torch.dtype) -> NDArray[np.float64]:
    """As float64, computed in `dtype`: float32 cannot hold the squares of everything that it holds."""
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=dtype) for block in blocks])
    return np.asarray(download(norms), np.float64)
