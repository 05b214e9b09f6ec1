"""What a collective may do with this rank's gradients: take entries out, turn them into frames, add what arrives.

Rounding is settled here: whoever codes entries keeps the error, and computes with what the others will decode.
A rank whose gradient is not finite takes part with poisoned frames; whoever opens one is poisoned too, so that at the
end of any all-reduce every rank knows, and every rank rolls its step back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from spardl import kernels
from spardl.accumulator import Accumulator
from spardl.sparse import Array, Ints, SparseBlocks
from spardl.wire.frame import Codec, CodedBlocks


class Memory:
    """An accumulator together with the wire format."""

    def __init__(self, acc: Accumulator, codec: Codec) -> None:
        self.acc = acc
        self.codec = codec
        self._sent = _Sent()
        self._kernels = kernels.for_device(acc.device)
        self._no_scales = self._kernels.array(torch.empty(0, device=acc.device))

    @property
    def lengths(self) -> Ints:
        """Of all blocks."""
        return self.acc.lengths

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """What there is to do while messages travel: adding up the blocks that wait for it, if any do."""
        return self.acc.add_up if self.acc.waits else None

    def take_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        return self.acc.take_largest(ids, budgets)

    def take_coded(self, ids: Ints, budgets: Ints) -> CodedBlocks:
        """The `budgets[i]` largest entries of each block `ids[i]`, in the wire's format; rounding errors stay here."""
        if self.codec.values != "bf16" or not self.acc.leaves_errors:
            return self.code(self.acc.take_largest(ids, budgets))
        taken = self.acc.take_rounded(ids, budgets)
        return CodedBlocks(ids, *taken, self._no_scales, torch.bfloat16) if taken is not None else self._nothing(ids)

    def take_largest_of_all(self, budget: int) -> SparseBlocks:
        return self.acc.take_largest_of_all(budget)

    def give_back(self, entries: SparseBlocks) -> None:
        self.acc.give_back(entries)

    def code(self, entries: SparseBlocks, *, keep_error: bool = True) -> CodedBlocks:
        """Round entries to the wire's format. One rank of those that hold the same entries keeps the error."""
        if self.codec.values != "none" and not self._kernels.all_finite(entries.amounts):
            self.acc.poisoned = True
            return self._nothing(entries.ids)
        if self.codec.values in ("none", "fp32"):
            return self.codec.code(entries)
        coded, errors = self.codec.round_off(entries)
        if keep_error:
            self.give_back(SparseBlocks(entries.ids, entries.counts, entries.places, errors))
        return coded

    def without_values(self) -> "Memory":
        """The same memory, with frames that carry indices only."""
        twin = Memory(self.acc, Codec("none", self.codec.indices))
        twin._sent = self._sent
        return twin

    @property
    def entries_sent(self) -> int:
        """Indices that have left this rank, with or without values, since it was made."""
        return self._sent.entries

    @property
    def seconds_packing(self) -> float:
        """Spent on making and opening frames, since it was made."""
        return self._sent.seconds

    def pack(self, coded: CodedBlocks, budgets: Ints) -> Array:
        started = perf_counter()
        if self.acc.poisoned:
            coded = self._nothing(coded.ids)
        frame = self.codec.pack(coded, self.lengths[coded.ids], budgets, poisoned=self.acc.poisoned)
        self._sent.entries += len(coded.places)
        self._sent.seconds += perf_counter() - started
        return frame

    def capacity(self, ids: Ints, budgets: Ints) -> int:
        return self.codec.capacity(self.lengths[ids], budgets)

    def unpack(self, frame: Array, ids: Ints, budgets: Ints, peer: int) -> CodedBlocks:
        """The blocks `ids` that `peer` sent, checked."""
        started = perf_counter()
        coded = self.codec.unpack(frame, ids, self.lengths[ids], budgets, peer)
        self._sent.seconds += perf_counter() - started
        if coded is None:
            self.acc.poisoned = True
            return self._nothing(ids)
        return coded

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
            return entries, SparseBlocks.empty(entries.ids, self.acc.device)
        kept, others = self._kernels.part_largest(entries.places, entries.amounts, budget)
        return _single(entries.ids, *kept), _single(entries.ids, *others)

    def largest(self, values: Tensor, budget: int) -> Tensor:
        """Mask of the `budget` values of largest magnitude, ties to the first."""
        return torch.as_tensor(self._kernels.keep_largest(values, budget))

    def part(self, entries: SparseBlocks, mask: Tensor) -> tuple[SparseBlocks, SparseBlocks]:
        """Entries where `mask` holds, and the others."""
        return _where(entries, mask), _where(entries, ~mask)

    def _nothing(self, ids: Ints) -> CodedBlocks:
        return self.codec.code(SparseBlocks.empty(ids, self.acc.device))


@dataclass(slots=True)
class _Sent:
    entries: int = 0
    seconds: float = 0.0


def _where(entries: SparseBlocks, mask: Tensor) -> SparseBlocks:
    marks = np.concatenate(([0], np.cumsum(mask.cpu().numpy())))
    edges = np.concatenate(([0], np.cumsum(entries.counts)))
    return SparseBlocks(entries.ids, np.diff(marks[edges]), entries.indices[mask], entries.values[mask])


def _single(ids: Ints, places: Array, amounts: Array) -> SparseBlocks:
    return SparseBlocks(ids, np.array([len(places)]), places, amounts)
