"""Sums and cuts of sparse entries, in an order that gives every rank the same bits."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spardl.host import download, marked, upload
from spardl.kernels.api import Bools
from spardl.memory.buffer import Buffer
from spardl.memory.found import Found
from spardl.sparse import Array, Ints, SparseBlocks


class Algebra:
    """Entries in, entries out; no memory is touched. Lengths of blocks are those of the buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._kernels = buffer.kernels

    def zeros(self, count: int) -> Tensor:
        """A vector of so many zeros."""
        return torch.zeros(count, device=self._buffer.device)

    def merge(self, left: SparseBlocks, right: SparseBlocks) -> SparseBlocks:
        """The sum of two versions of the same single block, left first."""
        given = (left.places, left.amounts, right.places, right.amounts)
        return _single(left.ids, *self._kernels.merge(*given, int(self._buffer.lengths[left.ids[0]])))

    def sum(self, versions: list[SparseBlocks]) -> SparseBlocks:
        """The sum of all ranks' versions of a single block, in one fixed order: neighbours, then pairs of pairs."""
        while len(versions) > 1:
            pairs = [self.merge(*versions[i : i + 2]) for i in range(0, len(versions) - 1, 2)]
            versions = pairs + versions[len(versions) & ~1 :]
        return versions[0]

    def filled(self, entries: SparseBlocks, budget: int) -> SparseBlocks:
        """A single block with as many entries as `budget` says at least, if kernels fill: zeros where it had none."""
        length = int(self._buffer.lengths[entries.ids[0]])
        missing = min(budget, length) - len(entries) if self._kernels.fills else 0
        if missing <= 0:
            return entries
        zeros = self.zeros(missing)
        places = torch.arange(missing, dtype=torch.int32, device=zeros.device)
        return self.merge(entries, SparseBlocks(entries.ids, np.array([missing]), places, zeros))

    def without_zeros(self, entries: SparseBlocks) -> Found:
        """The entries of a single block that are not zero: kernels that fill leave some in sums."""
        return _counted(entries, entries.values != 0) if self._kernels.fills else Found.at_hand(entries)

    def cut(self, entries: SparseBlocks, budget: int) -> tuple[SparseBlocks, SparseBlocks]:
        """Split a single block into its `budget` largest entries and the rest."""
        if len(entries) <= budget:
            return entries, SparseBlocks.empty(entries.ids, entries.values.device)
        kept, others = self._kernels.part_largest(entries.places, entries.amounts, budget)
        return _single(entries.ids, *kept), _single(entries.ids, *others)

    def largest_of_all(self, entries: SparseBlocks, budget: int) -> Tensor:
        """Which of several blocks' entries are the `budget` largest among all of them; no zero is."""
        return torch.as_tensor(self._kernels.keep_largest(entries.amounts, budget)) & (entries.values != 0)

    def counts(self, entries: SparseBlocks, mask: Tensor) -> Tensor:
        """In how many of each block's entries `mask` holds; on the device."""
        edges = upload(np.concatenate(([0], np.cumsum(entries.counts))), mask.device)
        return torch.nn.functional.pad(mask.cumsum(0), (1, 0))[edges].diff()

    def where(self, entries: SparseBlocks, mask: Tensor, counts: Ints) -> SparseBlocks:
        """The entries where `mask` holds, which is in so many of each block. Nobody waits."""
        found = marked(mask, int(counts.sum()))
        return SparseBlocks(entries.ids, counts, entries.indices[found], entries.values[found])

    def part_above(self, entries: SparseBlocks, threshold: float) -> tuple[Found, SparseBlocks]:
        """Split a single block into entries of magnitude `threshold` or more and the others; if kernels fill, the
        others have zeros in the place of the first."""
        mask = entries.values.abs() >= threshold
        if not self._kernels.fills:
            kept = np.asarray(mask)
            return Found.at_hand(_where(entries, kept)), _where(entries, ~kept)
        mask &= entries.values != 0
        others = SparseBlocks(entries.ids, entries.counts, entries.places, entries.values.masked_fill(mask, 0))
        return _counted(entries, mask), others

    def part_by(self, entries: SparseBlocks, support: SparseBlocks) -> tuple[SparseBlocks, SparseBlocks]:
        """Split a single block into the entries at the coordinates of `support` and the others."""
        mask = download(among(entries.indices, support.indices))
        return _where(entries, mask), _where(entries, ~mask)

    def zeroed_at(self, entries: SparseBlocks, support: SparseBlocks) -> SparseBlocks:
        """The entries of a single block, with zeros at the coordinates of `support`."""
        amounts = entries.values.masked_fill(among(entries.indices, support.indices), 0)
        return SparseBlocks(entries.ids, entries.counts, entries.places, amounts)

    def smallest(self, entries: SparseBlocks, mask: Tensor | None = None) -> Tensor:
        """The smallest magnitude, where `mask` holds, as the bits of a float32; 0 of nothing. On the device."""
        magnitudes = entries.values.abs()
        if not len(magnitudes):
            return self.zeros(1).int()
        if mask is None:
            return magnitudes.min().reshape(1).view(torch.int32)
        least = magnitudes.where(mask, torch.inf).min().reshape(1)
        return least.where(mask.any(), 0.0).view(torch.int32)


def _where(entries: SparseBlocks, mask: Bools) -> SparseBlocks:
    marks = np.concatenate(([0], np.cumsum(mask)))
    edges = np.concatenate(([0], np.cumsum(entries.counts)))
    return SparseBlocks(entries.ids, np.diff(marks[edges]), entries.indices[mask], entries.values[mask])


def _counted(entries: SparseBlocks, mask: Tensor) -> Found:
    """The entries of a single block where `mask` holds, on a device."""

    def look(count: int) -> SparseBlocks:
        found = marked(mask, count)
        return _single(entries.ids, entries.indices[found], entries.values[found])

    return Found(mask.sum(), look)


def _single(ids: Ints, places: Array, amounts: Array) -> SparseBlocks:
    return SparseBlocks(ids, np.array([len(places)]), places, amounts)


def among(places: Tensor, ascending: Tensor) -> Tensor:
    """Which of these places are among others, which ascend. `torch.isin` would make the host wait for some devices."""
    if not ascending.numel():
        return torch.zeros_like(places, dtype=torch.bool)
    nearest = torch.searchsorted(ascending, places).clamp(max=ascending.numel() - 1)
    return ascending[nearest] == places


def norm_of(several: Sequence[Tensor]) -> float:
    """The Euclidean norm of float32 values in all of these tensors, also where their squares are beyond what float32
    holds. The host waits once, or twice if they are."""
    for kind in (torch.float32, torch.float64):
        norms = download(torch.stack([torch.linalg.vector_norm(values, dtype=kind).double() for values in several]))
        if np.isfinite(norms).all():
            break
    return math.hypot(*norms.tolist())
