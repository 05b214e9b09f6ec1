"""Entries to frames and back, for one rank's memory.

Rounding is settled here: whoever codes entries keeps the error, and computes with what the others will decode.
A rank whose gradient is not finite sends poisoned frames; whoever opens one is poisoned too, so that at the end of any
all-reduce every rank knows, and every rank rolls its step back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from spardl.sparse import Array, Ints, SparseBlocks
from spardl.wire import vector
from spardl.wire.format import VALUE_FORMATS
from spardl.wire.frame import Codec, CodedBlocks

if TYPE_CHECKING:
    from spardl.memory.memory import Memory

NO_VALUES = next(each for each in VALUE_FORMATS.values() if not each.carries_values)


@dataclass(slots=True)
class Account:
    """What frames have cost so far: indices that left this rank, with or without values, and seconds spent on them."""

    entries: int = 0
    seconds: float = 0.0


class Frames:
    """The wire format that all ranks agreed on, for what is taken out of `memory` and given back to it."""

    def __init__(self, memory: "Memory", codec: Codec, account: Account) -> None:
        self.codec = codec
        self.account = account
        self._memory = memory

    def without_values(self) -> "Frames":
        """Frames of the same memory that carry indices only."""
        return Frames(self._memory, Codec(NO_VALUES, self.codec.indices, self.codec.kernels), self.account)

    def code(self, entries: SparseBlocks, *, keep_error: bool = True) -> CodedBlocks:
        """Round entries to the wire's format. One rank of those that hold the same entries keeps the error."""
        if self.codec.format.carries_values and not self._memory.health.note(
            self.codec.kernels.all_finite(entries.amounts)
        ):
            return self.nothing(entries.ids)
        if self.codec.format.exact:
            return self.codec.code(entries)
        coded, errors = self.codec.round_off(entries)
        if keep_error:
            self._memory.give_back(SparseBlocks(entries.ids, entries.counts, entries.places, errors))
        return coded

    def nothing(self, ids: Ints) -> CodedBlocks:
        """These blocks, without an entry."""
        return self.codec.code(self._memory.nothing(ids))

    def join(self, pieces: Sequence[CodedBlocks]) -> CodedBlocks:
        """The blocks of several pieces, one after the other."""
        return CodedBlocks.join(list(pieces))

    def capacity(self, ids: Ints, budgets: Ints) -> int:
        """The most bytes that a frame of these blocks can have."""
        return self.codec.capacity(self._memory.lengths[ids], budgets)

    def pack(self, coded: CodedBlocks, budgets: Ints) -> Array:
        """The frame of these blocks; poisoned, and without an entry, if this rank is."""
        started = perf_counter()
        poisoned = self._memory.health.poisoned
        if self._memory.health.known_poisoned:
            coded = self.nothing(coded.ids)
        frame = self.codec.pack(coded, self._memory.lengths[coded.ids], budgets, poisoned=poisoned)
        self.account.entries += len(coded.places)
        self.account.seconds += perf_counter() - started
        return frame

    def unpack(self, frame: Array, ids: Ints, budgets: Ints, peer: int, *, full: bool = False) -> CodedBlocks:
        """The blocks `ids` that `peer` sent, checked; nothing, and this rank is poisoned, if the frame is.

        full  the sender has filled their budgets, as far as its kernels do that: then a host need not wait to know how
              many entries they have, and what is wrong with them is known when the step is over
        """
        started, lengths = perf_counter(), self._memory.lengths[ids]
        if full and self.codec.kernels.fills:
            verdict, opened = self.codec.open(frame, ids, lengths, budgets)
            self._memory.health.judge(verdict, peer)
            self.account.seconds += perf_counter() - started
            return opened
        coded = self.codec.unpack(frame, ids, lengths, budgets, peer)
        self.account.seconds += perf_counter() - started
        if coded is None:
            self._memory.health.poison()
            return self.nothing(ids)
        return coded

    # --- values alone, for coordinates that both sides know ---------------------------------------------------------

    def values_capacity(self, count: int) -> int:
        """The bytes of a frame with `count` values and no index."""
        return vector.size(count, self.codec.format)

    def pack_values(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The frame of these values, and what its receivers will decode; poisoned if this rank is."""
        self._memory.health.note(self.codec.kernels.all_finite(values))
        return vector.pack(values, self.codec.format, self.codec.kernels, poisoned=self._memory.health.poisoned)

    def unpack_values(self, frame: Array, count: int, peer: int) -> Tensor:
        """The values that `peer` sent, checked; zeros, and this rank is poisoned, if the frame is."""
        if self.codec.kernels.fills:
            verdict, values = vector.opened(frame, count, self.codec.format, self.codec.kernels, peer)
            self._memory.health.judge(verdict, peer)
            return values
        found = vector.unpack(frame, count, self.codec.format, self.codec.kernels, peer)
        if found is None:
            self._memory.health.poison()
            return self._memory.algebra.zeros(count)
        return found

    def keep_error(self, entries: SparseBlocks, error: Array) -> None:
        """Leave here what rounding has cost each of these entries."""
        if not self.codec.format.exact:
            self._memory.give_back(SparseBlocks(entries.ids, entries.counts, entries.indices, error))

    def split_values(self, frame: Array, counts: list[int], peer: int) -> list[Tensor]:
        """Frames of `counts[i]` values each that arrived as one message."""
        return vector.split(frame, counts, self.codec.format, peer)

    def pack_floats(self, values: Tensor) -> Tensor:
        """These values as they are, as bytes of their own."""
        return vector.bare(values)

    def unpack_floats(self, frame: Array, count: int, peer: int) -> Tensor:
        """`count` values that were sent as they are, finite or not."""
        return vector.floats(frame, count, peer)
