"""Sparse vectors, several blocks at a time."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# What the kernels of a device compute on: numpy arrays on a CPU, tensors elsewhere. Where ranks share cores a round
# begins with cold caches, and a call into torch then takes as long as a loop over ten thousand entries.
Array = Any


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Entries of the blocks `ids`, one block after the other, `counts[i]` of block `ids[i]`.

    `places` (int32) are relative to their block and ascend within it; `amounts` are float32. On a CPU tensors will do
    as well as arrays. `indices` and `values` are the same as tensors.
    """

    ids: Ints
    counts: Ints
    places: Array
    amounts: Array

    @staticmethod
    def empty(ids: Ints, device: torch.device) -> "SparseBlocks":
        nothing = torch.empty(0, device=device)
        return SparseBlocks(ids, np.zeros(len(ids), np.int64), nothing.int(), nothing)

    @property
    def indices(self) -> Tensor:
        return torch.as_tensor(self.places)

    @property
    def values(self) -> Tensor:
        return torch.as_tensor(self.amounts)

    def __len__(self) -> int:
        """The number of entries in all blocks."""
        return len(self.places)


def split(entries: SparseBlocks) -> list[SparseBlocks]:
    """One piece per block."""
    return [
        SparseBlocks(entries.ids[i : i + 1], entries.counts[i : i + 1], places, amounts)
        for i, (places, amounts) in enumerate(
            zip(parts(entries.places, entries.counts), parts(entries.amounts, entries.counts), strict=True)
        )
    ]


def parts(values: Array, counts: Ints) -> list[Array]:
    """Stretches of so many values each."""
    stops = itertools.accumulate(counts.tolist())
    return [values[stop - count : stop] for count, stop in zip(counts.tolist(), stops, strict=True)]


def join(pieces: Sequence[Array]) -> Array:
    """One after the other. All of one kind."""
    return np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else torch.cat(list(pieces))
