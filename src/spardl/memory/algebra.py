"""Sums and cuts of sparse entries, in an order that gives every rank the same bits."""

import math

import numpy as np
import torch
from torch import Tensor

from spardl.host import download, upload
from spardl.kernels import Kernels
from spardl.kernels.api import Bools
from spardl.sparse import Array, Ints, SparseBlocks


class Algebra:
    """Entries in, entries out; no memory is touched."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    def zeros(self, count: int) -> Tensor:
        """A vector of so many zeros."""
        return torch.zeros(count, device=self._device)

    def merge(self, left: SparseBlocks, right: SparseBlocks) -> SparseBlocks:
        """The sum of two versions of the same single block, left first."""
        return _single(left.ids, *self._kernels.merge(left.places, left.amounts, right.places, right.amounts))

    def sum(self, versions: list[SparseBlocks]) -> SparseBlocks:
        """The sum of all ranks' versions of a single block, in one fixed order: neighbours, then pairs of pairs."""
        while len(versions) > 1:
            pairs = [self.merge(*versions[i : i + 2]) for i in range(0, len(versions) - 1, 2)]
            versions = pairs + versions[len(versions) & ~1 :]
        return versions[0]

    def cut(self, entries: SparseBlocks, budget: int) -> tuple[SparseBlocks, SparseBlocks]:
        """Split a single block into its `budget` largest entries and the rest."""
        if len(entries) <= budget:
            return entries, SparseBlocks.empty(entries.ids, entries.values.device)
        kept, others = self._kernels.part_largest(entries.places, entries.amounts, budget)
        return _single(entries.ids, *kept), _single(entries.ids, *others)

    def cut_all(self, entries: SparseBlocks, budget: int) -> tuple[SparseBlocks, SparseBlocks]:
        """Split several blocks into the `budget` entries that are largest among all of them, and the rest."""
        return self.part(entries, self._kernels.keep_largest(entries.amounts, budget))

    def part(self, entries: SparseBlocks, mask: Array) -> tuple[SparseBlocks, SparseBlocks]:
        """Split entries into those where `mask` holds and the others."""
        if isinstance(mask, Tensor) and mask.device.type != "cpu":
            return _part_far(entries, mask)
        kept = np.asarray(mask)
        return _where(entries, kept), _where(entries, ~kept)

    def part_above(self, entries: SparseBlocks, threshold: float) -> tuple[SparseBlocks, SparseBlocks]:
        """Split entries into those of magnitude `threshold` or more and the others."""
        return self.part(entries, entries.values.abs() >= threshold)

    def part_by(self, entries: SparseBlocks, support: SparseBlocks) -> tuple[SparseBlocks, SparseBlocks]:
        """Split a single block into the entries at the coordinates of `support` and the others."""
        return self.part(entries, torch.isin(entries.indices, support.indices))

    def smallest(self, entries: SparseBlocks) -> float:
        """The smallest magnitude; 0 of nothing."""
        return float(download(entries.values.abs().min())) if len(entries) else 0.0


def _where(entries: SparseBlocks, mask: Bools) -> SparseBlocks:
    marks = np.concatenate(([0], np.cumsum(mask)))
    edges = np.concatenate(([0], np.cumsum(entries.counts)))
    return SparseBlocks(entries.ids, np.diff(marks[edges]), entries.indices[mask], entries.values[mask])


def _part_far(entries: SparseBlocks, mask: Tensor) -> tuple[SparseBlocks, SparseBlocks]:
    """`_where` for both parts, of entries on a device: the host waits once, for their counts."""
    edges = upload(np.concatenate(([0], np.cumsum(entries.counts))), mask.device)
    kept = np.diff(download(torch.nn.functional.pad(mask.cumsum(0), (1, 0))[edges]))
    parts = []
    for marks, counts in ((mask, kept), (~mask, entries.counts - kept)):
        found = torch.nonzero_static(marks, size=int(counts.sum())).flatten()
        parts.append(SparseBlocks(entries.ids, counts, entries.indices[found], entries.values[found]))
    return parts[0], parts[1]


def _single(ids: Ints, places: Array, amounts: Array) -> SparseBlocks:
    return SparseBlocks(ids, np.array([len(places)]), places, amounts)


def norm_of(values: Tensor) -> float:
    """The Euclidean norm of float32 values, also where their squares are beyond what float32 holds."""
    norm = float(torch.linalg.vector_norm(values))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(values.double()))
