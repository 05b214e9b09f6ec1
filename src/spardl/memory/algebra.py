"""Sums and cuts of sparse entries, in an order that gives every rank the same bits."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spardl.host import download, upload
from spardl.kernels.api import Bools
from spardl.memory.buffer import Buffer
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
        missing = budget - len(entries) if self._kernels.fills else 0
        if missing <= 0:
            return entries
        zeros = self.zeros(missing)
        return self.merge(entries, SparseBlocks(entries.ids, np.array([missing]), zeros.int(), zeros))

    def without_zeros(self, entries: SparseBlocks) -> SparseBlocks:
        """The entries of a single block that are not zero: kernels that fill leave some in sums, and are asked once."""
        if not self._kernels.fills:
            return entries
        found = torch.nonzero(entries.values).flatten()
        return _single(entries.ids, entries.indices[found], entries.values[found])

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
        return self.part(entries, among(entries.indices, support.indices))

    def zeroed_at(self, entries: SparseBlocks, support: SparseBlocks) -> SparseBlocks:
        """The entries of a single block, with zeros at the coordinates of `support`."""
        amounts = entries.values.masked_fill(among(entries.indices, support.indices), 0)
        return SparseBlocks(entries.ids, entries.counts, entries.places, amounts)

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
