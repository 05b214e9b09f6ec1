"""What a device must be able to compute: the interface between the algorithms and the hot loops.

`cpu/` (compiled), `torch.py` (any device) and `triton/` (the same, with hot passes of its own) are objects of it, and
give the same bits. Callers choose one by `kernels.for_device`, once, and hand it down.

Words. *Natural order* is that of the tensors, chunks of which are dealt to blocks; memory is kept in *block order*,
each block contiguous (`starts` and `chunk` say how, see memory/layout.py). A block lies in memory from `firsts[b]` to
`stops[b]`, and its entries have indices relative to it. An entry is *taken* when it moves out of memory and leaves
zero, or its rounding error, behind.
"""

from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import Count, Flag
from spardl.wire.format import FrameFormat, ValueFormat

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

# What kernels compute on and return: numpy arrays on a CPU (which takes tensors as well), tensors on any other device.
# Where ranks share cores a round begins with cold caches, and a call into torch then takes as long as a loop over ten
# thousand entries. Whoever holds an Array may slice it, take its length and pass it to the kernels that it came from;
# `torch.as_tensor` makes a tensor of it, without a copy.
Array: TypeAlias = NDArray[Any] | Tensor

A = TypeVar("A")
S = TypeVar("S")


class CodedEntries(NamedTuple, Generic[A]):
    """Entries as frames hold them, one block after the other.

    counts  of each block, on the host
    places  int32, relative to their block, ascending within it
    codes   one per entry, of the type that the value format says; none if only indices travel
    scales  float32, as many per block as the value format says (`scale_counts`); none if it is not scaled
    """

    counts: Ints
    places: A
    codes: A
    scales: A


class Shortlist(Protocol):
    """What kernels keep from one step to the next, so that a selection need not read all memory again.

    It is valid for a step in which every element is added exactly once, in natural order, before anything is taken.
    """

    def begin(self) -> None:
        """Start a step: what the last one has learned is used from now on. O(blocks)."""

    def give_up(self) -> None:
        """Declare the lists of this step invalid: selections look at all memory. O(blocks)."""


class KernelsOf(Protocol[A, S]):
    """The hot loops of one kind of device, whose arrays are A and whose shortlists are S.

    Below, n is the number of elements in the blocks that a call is about, k the number of entries that it takes or is
    given, and b the number of blocks. Memory (`acc`, `velocity`, `out`) is float32 and changed in place. Budgets,
    counts and bounds are host arrays on every device. Ties between equal magnitudes go to the lowest index, zeros are
    never selected, and magnitudes and thresholds are compared as float32.

    What stays on the device. A device with a queue of its own makes whoever reads from it wait. So flags, of
    `all_finite`, `accumulate`, `differ`, `accumulate_momentum` and `take_rounded`, may be tensors on it: callers
    collect them, and read all at once when a step is over (`spardl.memory.health`). Counts are on the host, and so that
    nobody has to wait for them, kernels of such devices *fill* (`fills`): `take_largest`, `take_rounded`,
    `keep_largest` and `part_largest` choose as many entries as the budget says, zeros if there is nothing else, and
    `merge` gives as many as it was given, or as the block is long. A zero more changes no sum. Frames are then as long
    as they may be, whether they are poisoned may be a tensor, and of those whose blocks are `full` so is the verdict.
    What they count stays on the device as well. The host waits in `read_frame` alone, where blocks are not full: twice,
    for the head and for the verdict on what follows.
    """

    fills: bool  # whether selections and sums have as many entries as they may, zeros among them

    # --- arrays -------------------------------------------------------------------------------------------------

    def array(self, values: A) -> A:
        """The memory of `values` as the kind of array that these kernels compute on. O(1)."""
        ...

    def tensor(self, values: A, kind: torch.dtype) -> Tensor:
        """The memory of `values` as a tensor of this type, for codes that numpy has no type for. O(1)."""
        ...

    def new_shortlist(self, blocks: int) -> S | None:
        """An empty shortlist for memory of `blocks` blocks, or None if these kernels keep none. O(b)."""
        ...

    def all_finite(self, values: A) -> Flag:
        """Whether no value is infinite or NaN. One read of `values`."""
        ...

    # --- natural order and block order --------------------------------------------------------------------------

    def accumulate(
        self,
        acc: A,
        starts: Ints,
        chunk: int,
        offset: int,
        gradient: Tensor,
        scale: float,
        wanted: Bools,
        shortlist: S | None = None,
    ) -> Flag:
        """Add `scale * gradient`, which begins at natural position `offset`, to `acc` in the `wanted` blocks; there,
        `gradient` becomes what `acc` held before. Returns whether all sums are finite, and notes in `shortlist` where
        they are large. One read and one write of both."""
        ...

    def differ(
        self,
        acc: A,
        starts: Ints,
        chunk: int,
        offset: int,
        shared: Tensor,
        own: Tensor,
        wanted: Bools,
        shortlist: S | None = None,
    ) -> Flag:
        """Set `acc` to `shared - own`, which begin at natural position `offset`, in the `wanted` blocks, whatever it
        held. Returns whether all differences are finite, and notes in `shortlist` where they are large. One read of
        both and one write of `acc`."""
        ...

    def accumulate_momentum(
        self,
        acc: A,
        velocity: Tensor,
        updated: Tensor,
        starts: Ints,
        chunk: int,
        offset: int,
        gradient: Tensor,
        weights: Tensor,
        scale: float,
        momentum: float,
        decay: float,
        damping: float,
        nesterov: bool,
        wanted: Bools,
        shortlist: S | None = None,
    ) -> Flag:
        """Add momentum SGD's direction instead of the plain gradient, as `accumulate` does: with
        g' = scale*g + decay*w and v' = momentum*v + damping*g' it is v', or g' + momentum*v' for Nesterov. v' is
        written to `updated`; `velocity` stays as it was. One pass over all of them."""
        ...

    def read(self, acc: A, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
        """Copy `out.numel()` elements from natural position `offset` on into `out`. O(n)."""
        ...

    def write(self, acc: A, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
        """Copy `source` to natural positions from `offset` on. O(n)."""
        ...

    def to_natural_order(
        self, starts: Ints, chunk: int, counts: Ints, indices: A, values: A, factor: float = 1.0
    ) -> tuple[A, A]:
        """Natural positions (int64, ascending) and `factor` times the values of entries that are given for all blocks,
        block by block. O(k + chunks), or O(k log k)."""
        ...

    def put_only(self, out: Tensor, positions: A, values: A) -> None:
        """Make `out` zero everywhere but at these natural positions, which ascend. One write of `out`."""
        ...

    # --- weights ------------------------------------------------------------------------------------------------

    def changes(self, acc: A, starts: Ints, chunk: int, positions: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Of positions in block order that were changed one after the other and held `before` then: where they lie in
        natural order, ascending, and what each held when it was first changed, less what it holds now. A position may
        occur several times. `acc` is of no use afterwards. O(k), or O(k log k), and a bit of each element of `acc`."""
        ...

    def land(self, shared: Tensor, own: Tensor, support: Tensor, step: Tensor, touched: Tensor, sent: Tensor) -> None:
        """Move shared and own weights by -`step` at `support`, and then own ones so that `sent` is gone from what their
        difference was at `touched`, where a position may occur several times with the same value. O(k)."""
        ...

    # --- selection ----------------------------------------------------------------------------------------------

    def take_largest(
        self,
        acc: A,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: S | None = None,
    ) -> tuple[Ints, A, A]:
        """Take the `budgets[b]` entries of largest magnitude out of each block; return counts, indices (ascending
        within each block) and values. Exact. O(k) where the `shortlist` of block `ids[b]` suffices, otherwise a small
        number of passes over the block."""
        ...

    def take_rounded(
        self,
        acc: A,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: S | None = None,
    ) -> tuple[Ints, A, A, Flag]:
        """Take the nearest bf16 (the largest finite one where it would overflow) of the entries that `take_largest`
        would take, and leave the rounding errors; return counts, indices, codes, and whether all entries are finite.
        As fast as `take_largest`."""
        ...

    def take_above(
        self, acc: A, first: int, stop: int, threshold: float, limit: int, shortlist: S | None = None
    ) -> tuple[A, A]:
        """Take the first `limit` entries of magnitude `threshold` or more out of `acc[first:stop]`; return indices
        relative to `first`, and values. One pass, or O(k) where the `shortlist`, then one of all of `acc` as a single
        block, reaches down to the threshold. Kernels that fill count nothing: there have to be `limit` of them."""
        ...

    def count_above(self, values: A, threshold: float, shortlist: S | None = None) -> Count:
        """How many values have magnitude `threshold` or more. One pass, or O(k) with a `shortlist` of a single block
        that reaches down to the threshold."""
        ...

    def count_bins(self, values: A, first: int, shift: int, bins: int) -> Array:
        """How many magnitudes lie in each of `bins` bins of 2**shift float32 bit patterns, from bin `first` up; those
        above the last bin count in it, those below the first bin do not count. One pass."""
        ...

    def keep_largest(self, values: A, budget: int) -> A:
        """Mask of the `budget` values of largest magnitude. O(k)."""
        ...

    def part_largest(self, indices: A, values: A, budget: int) -> tuple[tuple[A, A], tuple[A, A]]:
        """The `budget` entries of largest magnitude, and the others; both keep their order. There must be more entries
        than the budget. O(k)."""
        ...

    # --- sparse arithmetic --------------------------------------------------------------------------------------

    def scatter_add(
        self,
        acc: A,
        firsts: Ints,
        counts: Ints,
        indices: A,
        values: A,
        ids: Ints | None = None,
        shortlist: S | None = None,
    ) -> None:
        """Add entries, whose indices are unique within each block, to their blocks; the `shortlist`, in which block b
        has number `ids[b]`, learns which sums became large. O(k)."""
        ...

    def fade(self, memory: A, firsts: Ints, counts: Ints, indices: A, values: A, share: float) -> None:
        """Multiply the elements at these indices by share * |element| / |value|, where that is less than one. O(k)."""
        ...

    def merge(self, left: A, left_values: A, right: A, right_values: A, length: int) -> tuple[A, A]:
        """The sum of two sparse versions of a block of this length, whose indices ascend, none twice in one of them;
        entries that cancel to zero vanish, unless these kernels fill. O(k), or O(k log k)."""
        ...

    # --- what travels -------------------------------------------------------------------------------------------

    def round_bf16(self, values: A) -> tuple[A, A]:
        """The nearest bf16 of finite values, ties to even, the largest finite one where it would overflow; and what
        rounding cost each. O(k)."""
        ...

    def widen_bf16(self, codes: A) -> A:
        """The float32 values of bf16 codes. O(k)."""
        ...

    def encode(self, form: ValueFormat, values: Tensor, counts: Ints) -> tuple[Tensor, Tensor]:
        """As the format says (`ValueFormat.encode`): codes of values, and scales. O(k)."""
        ...

    def decode(self, form: ValueFormat, codes: Tensor, scales: Tensor, counts: Ints) -> Tensor:
        """The values that these codes and scales stand for (`ValueFormat.decode`). O(k)."""
        ...

    def pack_codes(self, codes: Tensor, bits: int) -> Tensor:
        """Codes, one per entry, as the bytes that they take on the wire: `bits` each, the first one lowest. O(k)."""
        ...

    def unpack_codes(self, data: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
        """The `count` codes that `pack_codes` made these bytes of. O(k)."""
        ...

    def frame_room(self, form: FrameFormat, lengths: Ints, budgets: Ints) -> int:
        """The most bytes that a frame for blocks of these lengths and budgets can have. O(b), on the host."""
        ...

    def write_frame(
        self, form: FrameFormat, poisoned: Flag, lengths: Ints, budgets: Ints, entries: CodedEntries[A]
    ) -> A:
        """The frame of these entries, as bytes (wire/format.py), in at most `frame_room` of them; only kernels that
        fill are given a flag on a device. O(k + b)."""
        ...

    def read_frame(
        self, frame: A, form: FrameFormat, lengths: Ints, budgets: Ints, *, full: bool = False
    ) -> tuple[int | Tensor, CodedEntries[A]]:
        """How many entries a frame has, or a verdict (wire/format.py), and the entries. Nothing in `frame` is trusted;
        bytes behind the frame do not count. O(k + b).

        full  blocks have as many entries as they may, if the sender's kernels fill. Kernels that fill then give the
              verdict as a tensor, 0 if all is well; entries of a frame that is refused are zeros, in their blocks."""
        ...


class Kernels(KernelsOf[Array, Shortlist], Protocol):
    """The kernels that callers hold. They are given arrays and shortlists that they made themselves, and tensors on
    their own device, so that callers need not know which kind they are."""
