"""Sparse vectors, several blocks at a time.

Methods build on these, and the command line lists methods before anything needs torch; so it is imported when it is
used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spardl.kernels.api import Array, Ints
else:
    Array, Ints = Any, NDArray[np.int64]

__all__ = ["Array", "Ints", "SparseBlocks", "join", "parts", "split"]


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
    def empty(ids: Ints, device: torch.device) -> SparseBlocks:
        import torch

        nothing = torch.empty(0, device=device)
        return SparseBlocks(ids, np.zeros(len(ids), np.int64), nothing.int(), nothing)

    @property
    def indices(self) -> Tensor:
        import torch

        return torch.as_tensor(self.places)

    @property
    def values(self) -> Tensor:
        import torch

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
    """Stretches of `counts[i]` values each."""
    stops = itertools.accumulate(counts.tolist())
    return [values[stop - count : stop] for count, stop in zip(counts.tolist(), stops, strict=True)]


def join(pieces: Sequence[Array]) -> Array:
    """All pieces, which are all numpy's or all torch's, one after the other."""
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    import torch

    return torch.cat([torch.as_tensor(piece) for piece in pieces])
