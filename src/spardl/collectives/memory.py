"""What a collective may do with this rank's gradients: take entries out, turn them into frames, add what arrives.

Rounding is settled here: whoever codes entries keeps the error, and computes with what the others will decode.
A rank whose gradient is not finite takes part with poisoned frames; whoever opens one is poisoned too, so that at the
end of any all-reduce every rank knows, and every rank rolls its step back.
"""

import numpy as np
from torch import Tensor

from spardl import kernels
from spardl.accumulator import Accumulator
from spardl.sparse import Ints, SparseBlocks
from spardl.wire.frame import Codec, CodedBlocks


class Memory:
    """An accumulator together with the wire format."""

    def __init__(self, acc: Accumulator, codec: Codec) -> None:
        self.acc = acc
        self.codec = codec
        self.entries_sent = 0
        self._kernels = kernels.for_device(acc.device)

    def take_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        return self.acc.take_largest(ids, budgets)

    def give_back(self, entries: SparseBlocks) -> None:
        self.acc.give_back(entries)

    def code(self, entries: SparseBlocks, *, keep_error: bool = True) -> CodedBlocks:
        """Round entries to the wire's format. One rank of those that hold the same entries keeps the error."""
        coded = self.codec.code(entries)
        if self.codec.values != "fp32":
            rounded = coded.decode().values
            if not self._kernels.all_finite(rounded):
                self.acc.poisoned = True
            elif keep_error:
                error = entries.values - rounded
                self.give_back(SparseBlocks(entries.ids, entries.counts, entries.indices, error))
        elif not self._kernels.all_finite(entries.values):
            self.acc.poisoned = True
        return self._nothing(entries.ids) if self.acc.poisoned else coded

    def pack(self, coded: CodedBlocks, budgets: Ints) -> Tensor:
        if self.acc.poisoned:
            coded = self._nothing(coded.ids)
        self.entries_sent += int(coded.counts.sum())
        return self.codec.pack(coded, self.acc.layout.lengths[coded.ids], budgets, poisoned=self.acc.poisoned)

    def capacity(self, ids: Ints, budgets: Ints) -> int:
        return self.codec.capacity(self.acc.layout.lengths[ids], budgets)

    def unpack(self, frame: Tensor, ids: Ints, budgets: Ints, peer: int) -> CodedBlocks:
        """The blocks `ids` that `peer` sent, checked."""
        coded = self.codec.unpack(frame, ids, self.acc.layout.lengths[ids], budgets, peer)
        if coded is None:
            self.acc.poisoned = True
            return self._nothing(ids)
        return coded

    def merge(self, left: SparseBlocks, right: SparseBlocks) -> SparseBlocks:
        """The sum of two versions of the same single block, left first."""
        indices, values = self._kernels.merge(left.indices, left.values, right.indices, right.values)
        return _single(left.ids, indices, values)

    def cut(self, entries: SparseBlocks, budget: int) -> tuple[SparseBlocks, SparseBlocks]:
        """Split a single block into its `budget` largest entries and the rest."""
        if len(entries) <= budget:
            return entries, SparseBlocks.empty(entries.ids, self.acc.device)
        keep = self._kernels.keep_largest(entries.values, budget)
        kept = _single(entries.ids, entries.indices[keep], entries.values[keep])
        return kept, _single(entries.ids, entries.indices[~keep], entries.values[~keep])

    def _nothing(self, ids: Ints) -> CodedBlocks:
        return self.codec.code(SparseBlocks.empty(ids, self.acc.device))


def _single(ids: Ints, indices: Tensor, values: Tensor) -> SparseBlocks:
    return SparseBlocks(ids, np.array([indices.numel()]), indices, values)
