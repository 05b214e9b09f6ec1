"""Sparse vectors, several blocks at a time."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Entries of the blocks `ids`, one block after the other, `counts[i]` of block `ids[i]`.

    Indices (int32) are relative to their block and ascend within it; values are float32.
    """

    ids: Ints
    counts: Ints
    indices: Tensor
    values: Tensor

    @staticmethod
    def empty(ids: Ints, device: torch.device) -> "SparseBlocks":
        nothing = torch.empty(0, device=device)
        return SparseBlocks(ids, np.zeros(len(ids), np.int64), nothing.int(), nothing)

    def __len__(self) -> int:
        """The number of entries in all blocks."""
        return self.indices.numel()


def split(entries: SparseBlocks) -> list[SparseBlocks]:
    """One piece per block."""
    sizes = entries.counts.tolist()
    pieces = zip(entries.indices.split(sizes), entries.values.split(sizes), strict=True)
    return [
        SparseBlocks(entries.ids[i : i + 1], entries.counts[i : i + 1], indices, values)
        for i, (indices, values) in enumerate(pieces)
    ]
