"""What a program may ask about the values in memory without taking any. A poisoned rank answers with zeros."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spardl.host import Count, download
from spardl.memory.transaction import Transaction
from spardl.sparse import Array

SAMPLE = 1 << 16
KINDS = (torch.float32, torch.float64)


class Survey:
    """Counts, norms and a quantile of one transaction's sums. For what is "on the device" nobody waits."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def count_above(self, threshold: float) -> int:
        """How many values have magnitude `threshold` or more. One pass, or none where the shortlist reaches so far."""
        found = self._count_above(threshold)
        return int(download(found)) if isinstance(found, Tensor) else found

    def counts_above(self, thresholds: Sequence[float]) -> Tensor:
        """The same for each of these; on the device."""
        return torch.stack([torch.as_tensor(self._count_above(threshold)) for threshold in thresholds])

    def _count_above(self, threshold: float) -> Count:
        self._transaction.add_up()
        return self._transaction.buffer.count_above(threshold)

    def count_bins(self, block: int, first: int, shift: int, bins: int) -> Array:
        """How many magnitudes of a block lie in each bin of 2**shift float32 bit patterns, from bin `first` up; on the
        device."""
        self._transaction.add_up()
        buffer = self._transaction.buffer
        if self._transaction.health.known_poisoned:
            return np.zeros(bins, np.int64)
        stretch = buffer.values[int(buffer.starts[block]) : int(buffer.starts[block + 1])]
        return buffer.kernels.count_bins(stretch, first, shift, bins)

    def magnitude_of(self, target: int) -> float:
        """About the magnitude that `target` entries reach, by a sample of `SAMPLE` values; 0 if poisoned."""
        bits = download(self.bits_of_magnitude(target))
        return float(bits.view(np.float32)[0]) if not self._transaction.health.is_poisoned() else 0.0

    def bits_of_magnitude(self, target: int) -> Tensor:
        """Its bits as a float32, a whole number; on the device, whether poisoned or not."""
        self._transaction.add_up()
        values = self._transaction.buffer.values
        sample = values[:: max(1, values.numel() // SAMPLE)].abs()
        rank = max(1, round(sample.numel() * target / values.numel()))
        return torch.topk(sample, rank).values[-1:].view(torch.int32)

    def bits_of_norms(self) -> Tensor:
        """The Euclidean norm of each block, as the bits of a float64; 0 of what is not finite. On the device.

        In float32, unless that does not hold some of them, as it does not hold the squares of all that it holds.
        """
        self._transaction.add_up()
        buffer = self._transaction.buffer
        blocks = buffer.values.split(buffer.lengths.tolist())
        short, long = (
            torch.stack([torch.linalg.vector_norm(block, dtype=kind) for block in blocks]).double() for kind in KINDS
        )
        norms = short.where(short.isfinite().all(), long)
        return norms.where(norms.isfinite(), 0.0).view(torch.int64)
