"""The kernels of a CPU, over the loops that numba compiled. `spardl.kernels.api` says what each of them promises.

They take numpy arrays or tensors and return numpy arrays; of types that numpy does not know, such as bf16, the bits.
"""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import Flag
from spardl.kernels import torch_frames
from spardl.kernels.api import Array, Bools, CodedEntries, Ints, KernelsOf
from spardl.kernels.cpu import arithmetic, bf16, framing, order, selection
from spardl.kernels.cpu.arguments import Blocks, Rule, Stretch, Taken
from spardl.kernels.cpu.framing import CODING_OF
from spardl.kernels.cpu.shortlist import CpuShortlist
from spardl.wire.format import POISONED_FLAG, FrameFormat, ValueFormat

# The allocator returns freed memory to the system above a threshold that follows the largest block it has freed so far.
# One large block, never touched, spares every step the page faults of getting its buffers anew.
np.empty(31 << 20, np.uint8)

_NO_CODES = np.empty(0, np.uint16)

# numpy has no name for most short floats, and no use for fp16 here: their bits will do.
_BITS_OF = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


@functools.cache
def _array_type(kind: torch.dtype) -> "np.dtype[Any]":
    """The type of the arrays that hold codes of this type."""
    return _array(torch.empty(0, dtype=kind)).dtype


def _bits(values: Array) -> NDArray[np.uint32]:
    bits: NDArray[np.uint32] = _array(values).view(np.uint32)
    return bits


def _array(values: Array) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    bits = _BITS_OF.get(values.dtype)
    memory: NDArray[Any] = (values if bits is None else values.view(bits)).numpy()
    return memory


def _key(threshold: float) -> np.uint32:
    """The smallest key that counts as `threshold` or more; never that of zero."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite: nothing is that large
        return max(np.float32(abs(threshold)).view(np.uint32), np.uint32(1))


class CompiledKernels(KernelsOf[Array, CpuShortlist]):
    """One object serves all threads: it has no state of its own, and its loops let go of Python's lock."""

    fills = False

    def array(self, values: Array) -> NDArray[Any]:
        return _array(values)

    def tensor(self, values: Array, kind: torch.dtype) -> Tensor:
        return torch.from_numpy(_array(values)).view(kind)

    def new_shortlist(self, blocks: int) -> CpuShortlist:
        return CpuShortlist(blocks)

    def all_finite(self, values: Array) -> bool:
        return bool(selection.all_finite(_bits(values)))

    # --- natural order and block order --------------------------------------------------------------------------

    def accumulate(
        self,
        acc: Array,
        starts: Ints,
        chunk: int,
        offset: int,
        gradient: Tensor,
        scale: float,
        wanted: Bools,
        shortlist: CpuShortlist | None = None,
    ) -> bool:
        lists = (shortlist or CpuShortlist(len(starts) - 1)).lists
        stretch = Stretch(starts, chunk, offset)
        return bool(order.accumulate(_array(acc), *stretch, gradient.numpy(), np.float32(scale), wanted, *lists))

    def differ(
        self,
        acc: Array,
        starts: Ints,
        chunk: int,
        offset: int,
        shared: Tensor,
        own: Tensor,
        wanted: Bools,
        shortlist: CpuShortlist | None = None,
    ) -> bool:
        lists = (shortlist or CpuShortlist(len(starts) - 1)).lists
        stretch = Stretch(starts, chunk, offset)
        return bool(order.differ(_array(acc), *stretch, shared.numpy(), own.numpy(), wanted, *lists))

    def accumulate_momentum(
        self,
        acc: Array,
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
        shortlist: CpuShortlist | None = None,
    ) -> bool:
        lists = (shortlist or CpuShortlist(len(starts) - 1)).lists
        stretch = Stretch(starts, chunk, offset)
        rule = Rule(np.float32(scale), np.float32(momentum), np.float32(decay), np.float32(damping), nesterov)
        memory, given = (_array(acc), velocity.numpy(), updated.numpy()), (gradient.numpy(), weights.numpy())
        return bool(order.accumulate_momentum(*memory, *stretch, *given, *rule, wanted, *lists))

    def read(self, acc: Array, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
        order.read(_array(acc), starts, chunk, offset, out.numpy())

    def write(self, acc: Array, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
        order.write(_array(acc), starts, chunk, offset, source.numpy())

    def to_natural_order(
        self, starts: Ints, chunk: int, counts: Ints, indices: Array, values: Array, factor: float = 1.0
    ) -> tuple[Array, Array]:
        """One walk over the chunks, with a cursor in each block."""
        given = (_array(indices), _array(values), np.float32(factor))
        positions, ordered = np.empty(len(indices), np.int64), np.empty(len(indices), np.float32)
        order.to_natural_order(starts, chunk, counts, *given, positions, ordered)
        return positions, ordered

    def put_only(self, out: Tensor, positions: Array, values: Array) -> None:
        order.put_only(out.numpy(), _array(positions), _array(values))

    # --- weights ------------------------------------------------------------------------------------------------

    def changes(self, acc: Array, starts: Ints, chunk: int, positions: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing is sorted, and no position occurs twice: a bit for each element says whether it was changed."""
        natural, sent = np.empty(positions.numel(), np.int64), np.empty(positions.numel(), np.float32)
        count = order.changes(_array(acc), starts, chunk, positions.numpy(), before.numpy(), natural, sent)
        return torch.from_numpy(natural[:count]), torch.from_numpy(sent[:count])

    def land(self, shared: Tensor, own: Tensor, support: Tensor, step: Tensor, touched: Tensor, sent: Tensor) -> None:
        order.land(*(_array(each) for each in (shared, own, support, step, touched, sent)))

    # --- selection ----------------------------------------------------------------------------------------------

    def take_largest(
        self,
        acc: Array,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: CpuShortlist | None = None,
    ) -> tuple[Ints, Array, Array]:
        """Where the shortlist of a block suffices, only it is looked at. Otherwise two passes over the block: a
        histogram of the leading bits finds the bin that holds the last wanted magnitude, a sweep collects what lies in
        or above it, and that short list is settled bit by bit."""
        taken, count, _ = _take(acc, firsts, stops, budgets, ids, shortlist, rounded=False)
        return taken.counts, taken.indices[:count], taken.values[:count]

    def take_rounded(
        self,
        acc: Array,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: CpuShortlist | None = None,
    ) -> tuple[Ints, Array, Array, bool]:
        taken, count, fine = _take(acc, firsts, stops, budgets, ids, shortlist, rounded=True)
        return taken.counts, taken.indices[:count], taken.codes[:count], fine

    def take_above(
        self, acc: Array, first: int, stop: int, threshold: float, limit: int, shortlist: CpuShortlist | None = None
    ) -> tuple[Array, Array]:
        room = max(0, min(limit, stop - first))
        indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
        key = _key(threshold)
        listed = shortlist.down_to(key) if shortlist is not None else None
        if listed is None:
            taken = selection.take_above(_array(acc), first, stop, key, indices, values)
        else:
            taken = selection.take_listed(_array(acc), first, stop, key, *listed, indices, values)
        if shortlist is not None:
            shortlist.give_up()
            shortlist.expect_above(key, taken * len(acc) // max(1, stop - first))
        return indices[:taken], values[:taken]

    def count_above(self, values: Array, threshold: float, shortlist: CpuShortlist | None = None) -> int:
        key = _key(threshold)
        listed = shortlist.down_to(key) if shortlist is not None else None
        return int(selection.count_above(_bits(values) if listed is None else listed[1].view(np.uint32), key))

    def count_bins(self, values: Array, first: int, shift: int, bins: int) -> Ints:
        counts = np.zeros(bins, np.int64)
        selection.count_bins(_bits(values), first, shift, counts)
        return counts

    def keep_largest(self, values: Array, budget: int) -> Array:
        keep = np.empty(len(values), np.bool_)
        selection.keep_largest(_bits(values), budget, keep)
        return keep

    def part_largest(
        self, indices: Array, values: Array, budget: int
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        places, amounts = _array(indices), _array(values)
        room = places.size + 1
        kept, kept_values = np.empty(budget + 1, np.int32), np.empty(budget + 1, np.float32)
        others, other_values = np.empty(room, np.int32), np.empty(room, np.float32)
        count = selection.part_largest(places, amounts, budget, kept, kept_values, others, other_values)
        rest = places.size - count
        return (kept[:count], kept_values[:count]), (others[:rest], other_values[:rest])

    # --- sparse arithmetic --------------------------------------------------------------------------------------

    def scatter_add(
        self,
        acc: Array,
        firsts: Ints,
        counts: Ints,
        indices: Array,
        values: Array,
        ids: Ints | None = None,
        shortlist: CpuShortlist | None = None,
    ) -> None:
        if shortlist is None or ids is None:
            ids, shortlist = np.arange(firsts.size), CpuShortlist(firsts.size)
            shortlist.give_up()
        entries = (counts, _array(indices), _array(values))
        arithmetic.scatter_add(_array(acc), ids, firsts, *entries, *shortlist.lists)

    def fade(self, memory: Array, firsts: Ints, counts: Ints, indices: Array, values: Array, share: float) -> None:
        arithmetic.fade(_array(memory), firsts, counts, _array(indices), _array(values), np.float32(share))

    def merge(
        self, left: Array, left_values: Array, right: Array, right_values: Array, length: int
    ) -> tuple[Array, Array]:
        room = len(left) + len(right) + 1
        indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
        given = (_array(left), _array(left_values), _array(right), _array(right_values))
        count = arithmetic.merge(*given, indices, values)
        return indices[:count], values[:count]

    # --- what travels -------------------------------------------------------------------------------------------

    def round_bf16(self, values: Array) -> tuple[Array, Array]:
        given = _array(values)
        codes, errors = np.empty(given.size, np.uint16), np.empty(given.size, np.float32)
        bf16.round_bf16(given, codes, errors)
        return codes, errors

    def widen_bf16(self, codes: Array) -> Array:
        values = np.empty(len(codes), np.float32)
        bf16.widen_bf16(_array(codes), values)
        return values

    def encode(self, form: ValueFormat, values: Tensor, counts: Ints) -> tuple[Tensor, Tensor]:
        return form.encode(values, counts)

    def decode(self, form: ValueFormat, codes: Tensor, scales: Tensor, counts: Ints) -> Tensor:
        return form.decode(codes, scales, counts)

    def pack_codes(self, codes: Tensor, bits: int) -> Tensor:
        return torch_frames.pack_codes(codes, bits)

    def unpack_codes(self, data: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
        return torch_frames.unpack_codes(data, count, bits, dtype)

    def frame_room(self, form: FrameFormat, lengths: Ints, budgets: Ints) -> int:
        return int(
            framing.frame_room(lengths, budgets, form.values.bits, form.values.per_scale, CODING_OF[form.indices])
        )

    def write_frame(
        self, form: FrameFormat, poisoned: Flag, lengths: Ints, budgets: Ints, entries: CodedEntries[Array]
    ) -> Array:
        out = np.empty(self.frame_room(form, lengths, budgets), np.uint8)
        flags = form.flags | (POISONED_FLAG if poisoned else 0)
        counts, places, codes, scales = entries
        parts = (_array(scales).view(np.uint8), _array(codes).view(np.uint8), _array(places))
        how = (flags, CODING_OF[form.indices], form.values.bits)
        return out[: framing.write_frame(out, *how, lengths, budgets, counts, *parts)]

    def read_frame(
        self, frame: Array, form: FrameFormat, lengths: Ints, budgets: Ints, *, full: bool = False
    ) -> tuple[int | Tensor, CodedEntries[Array]]:
        values = form.values
        room = sum(budgets.tolist())
        counts, places = np.empty(budgets.size, np.int64), np.empty(room, np.int32)
        codes = np.empty(room if values.bits else 0, _array_type(values.dtype))
        scales = np.empty(values.scales_of(budgets), np.float32)
        of_codes = (values.bits, values.dtype.is_signed, values.not_finite)
        expected = (form.flags, CODING_OF[form.indices], *of_codes, values.per_scale, values.largest_scale)
        out = (counts, scales, codes.view(np.uint8), places)
        found = int(framing.read_frame(_array(frame), *expected, lengths, budgets, *out))
        entries, scaled = (found, values.scales_of(counts)) if found >= 0 else (0, 0)
        return found, CodedEntries(counts, places[:entries], codes[:entries], scales[:scaled])


def _take(
    acc: Array,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None,
    shortlist: CpuShortlist | None,
    *,
    rounded: bool,
) -> tuple[Taken, int, bool]:
    """What `take_largest` and `take_rounded` have in common: memory of what was taken, how much of it is used, and
    whether all that was rounded is finite."""
    if shortlist is None or ids is None:
        ids, shortlist = np.arange(firsts.size), CpuShortlist(firsts.size)
    blocks = Blocks(ids, firsts, stops, budgets)
    room = selection.room_for(firsts, stops, budgets) + 1
    counts, indices, values = np.zeros(firsts.size, np.int64), np.empty(room, np.int32), np.empty(room, np.float32)
    taken = Taken(counts, indices, values, np.empty(room, np.uint16) if rounded else _NO_CODES)
    count, fine = selection.take_largest(_array(acc), *blocks, *taken, *shortlist.lists, *shortlist.next)
    return taken, count, bool(fine)
