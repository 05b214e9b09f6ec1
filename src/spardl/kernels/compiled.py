"""Kernels for the CPU, over the loops that numba compiled. `portable.py` has the same names.

They take numpy arrays or tensors and return numpy arrays; of bf16, which numpy does not know, as the bits.

`firsts` and `stops` bound blocks in the accumulator's own order; `starts` and `chunk` describe how natural order is
dealt to blocks (blocks.py). Counts, budgets and bounds are small host arrays on every device.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.kernels import _frames, _gaps, _order, _select, _sparse, _values
from spardl.kernels.frames import POISONED_FLAG, Form
from spardl.kernels.shortlist import Shortlist

Array = NDArray[Any]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The allocator returns freed memory to the system above a threshold that follows the largest block it has freed so far.
# One large block, never touched, spares every step the page faults of getting its buffers anew.
np.empty(31 << 20, np.uint8)

_NO_CODES = np.empty(0, np.uint16)

# numpy has no name for bf16, and no use for fp16 here: their bits will do.
_WORDS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.uint16),
    torch.int8: np.dtype(np.int8),
}
_HALVES = (torch.bfloat16, torch.float16)


def array(values: Any) -> Array:
    """The same memory as the kernels compute on."""
    if isinstance(values, np.ndarray):
        return values
    memory: Array = (values.view(torch.uint16) if values.dtype in _HALVES else values).numpy()
    return memory


def tensor(values: Array, kind: torch.dtype) -> Tensor:
    """The way back, as values of this type."""
    return torch.from_numpy(values).view(kind)


def _bits(values: Any) -> NDArray[np.uint32]:
    bits: NDArray[np.uint32] = array(values).view(np.uint32)
    return bits


def _entries(indices: NDArray[np.int32], values: NDArray[np.float32], count: int) -> tuple[Array, Array]:
    return indices[:count], values[:count]


def _key(threshold: float) -> np.uint32:
    """The smallest key that counts as `threshold` or more; never that of zero."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite: nothing is that large
        return max(np.float32(abs(threshold)).view(np.uint32), np.uint32(1))


def all_finite(values: Any) -> bool:
    """True if no value is infinite or NaN. One read of `values`."""
    return bool(_select.all_finite(_bits(values)))


def accumulate(
    acc: Any,
    starts: Ints,
    chunk: int,
    offset: int,
    gradient: Tensor,
    scale: float,
    wanted: Bools,
    shortlist: Shortlist | None = None,
) -> bool:
    """Add `scale * gradient`, which begins at natural position `offset`, in the `wanted` blocks; there `gradient`
    becomes what `acc` held before.

    Says whether all sums are finite, and notes in `shortlist` where they are large.
    """
    listing = shortlist or Shortlist(len(starts) - 1)
    place = (starts, chunk, offset)
    given = (gradient.numpy(), np.float32(scale), wanted)
    return bool(_order.accumulate(array(acc), _bits(acc), *place, *given, listing.lows, *listing.lists))


def accumulate_momentum(
    acc: Any,
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
    shortlist: Shortlist | None = None,
) -> bool:
    """Like `accumulate`, for momentum SGD's direction: g' = scale*g + decay*w, v' = momentum*v + damping*g'.

    Adds v', or g' + momentum*v' for Nesterov. v' goes to `updated`; `velocity` stays as it was.
    """
    listing = shortlist or Shortlist(len(starts) - 1)
    fine = _order.accumulate_momentum(
        array(acc),
        _bits(acc),
        velocity.numpy(),
        updated.numpy(),
        starts,
        chunk,
        offset,
        gradient.numpy(),
        weights.numpy(),
        np.float32(scale),
        np.float32(momentum),
        np.float32(decay),
        np.float32(damping),
        nesterov,
        wanted,
        listing.lows,
        *listing.lists,
    )
    return bool(fine)


def read(acc: Any, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
    """Copy `out.numel()` elements from natural position `offset` on into `out`."""
    _order.read(array(acc), starts, chunk, offset, out.numpy())


def write(acc: Any, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
    """Copy `source` to natural positions from `offset` on."""
    _order.write(array(acc), starts, chunk, offset, source.numpy())


def to_natural_order(
    starts: Ints, chunk: int, counts: Ints, indices: Any, values: Any, factor: float = 1.0
) -> tuple[Array, Array]:
    """Natural positions (int64, ascending) and `factor` times the values of entries given for all blocks, block by
    block."""
    given = (array(indices), array(values), np.float32(factor))
    positions, ordered = np.empty(len(indices), np.int64), np.empty(len(indices), np.float32)
    _order.to_natural_order(starts, chunk, counts, *given, positions, ordered)
    return positions, ordered


def take_largest(
    acc: Any,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None = None,
    shortlist: Shortlist | None = None,
) -> tuple[Ints, Array, Array]:
    """Move the `budgets[b]` entries of largest magnitude out of each block; they become zero there.

    Exact: ties go to the lowest index, zeros are never taken. Where the `shortlist` of block `ids[b]` suffices, only it
    is looked at. Otherwise two passes over the block: a histogram of the leading bits finds the bin that holds the last
    wanted magnitude, a sweep collects what lies in or above it, and that short list is settled bit by bit.
    Returns counts, indices relative to the block (ascending) and values.
    """
    values = np.empty(_select.room_for(firsts, stops, budgets) + 1, np.float32)
    counts, indices, _ = _take(acc, firsts, stops, budgets, ids, shortlist, values, _NO_CODES)
    return counts, indices, values[: indices.size]


def take_rounded(
    acc: Any,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None = None,
    shortlist: Shortlist | None = None,
) -> tuple[Ints, Array, Array, bool]:
    """`take_largest`, but what is taken of each entry is the nearest bf16, the largest finite one where it would
    overflow; the rest stays. Says also whether all that was taken is finite."""
    room = _select.room_for(firsts, stops, budgets) + 1
    values, codes = np.empty(room, np.float32), np.empty(room, np.uint16)
    counts, indices, fine = _take(acc, firsts, stops, budgets, ids, shortlist, values, codes)
    return counts, indices, codes[: indices.size], fine


def _take(
    acc: Any,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None,
    shortlist: Shortlist | None,
    values: NDArray[np.float32],
    codes: NDArray[np.uint16],
) -> tuple[Ints, NDArray[np.int32], bool]:
    counts, indices = np.zeros(firsts.size, np.int64), np.empty(values.size, np.int32)
    if shortlist is None or ids is None:
        ids, shortlist = np.arange(firsts.size), Shortlist(firsts.size)
    sums = array(acc)
    blocks = (ids, firsts, stops, budgets, counts, indices, values, values.view(np.uint32), codes)
    listing = (shortlist.lows, *shortlist.lists, shortlist.amounts.view(np.uint32))
    noted = (shortlist.next_lows, shortlist.wanted)
    taken, fine = _select.take_largest(sums, sums.view(np.uint32), *blocks, *listing, *noted)
    return counts, indices[:taken], bool(fine)


def take_above(
    acc: Any, first: int, stop: int, threshold: float, limit: int, shortlist: Shortlist | None = None
) -> tuple[Array, Array]:
    """Move entries of magnitude `threshold` or more, the first `limit` of them, out of `acc[first:stop]`.

    One pass, or none where the `shortlist`, which then is one of all of `acc`, reaches down to the threshold.
    """
    room = max(0, min(limit, stop - first))
    indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
    key = _key(threshold)
    listed = shortlist.down_to(key) if shortlist is not None else None
    if listed is None:
        taken = _select.take_above(array(acc), _bits(acc), first, stop, key, indices, values)
    else:
        places, amounts = listed
        found = (places, amounts, amounts.view(np.uint32))
        taken = _select.take_listed(array(acc), first, stop, key, *found, indices, values)
    if shortlist is not None:
        shortlist.give_up()
        shortlist.expect_above(key, taken * len(acc) // max(1, stop - first))
    return _entries(indices, values, taken)


def count_above(values: Any, threshold: float, shortlist: Shortlist | None = None) -> int:
    """How many values have magnitude `threshold` or more; zeros never count."""
    key = _key(threshold)
    listed = shortlist.down_to(key) if shortlist is not None else None
    return int(_select.count_above(_bits(values) if listed is None else listed[1].view(np.uint32), key))


def count_bins(values: Any, first: int, shift: int, bins: int) -> Ints:
    """How many magnitudes lie in each of `bins` bins of 2**shift float32 bit patterns, from bin `first` up.

    Above the last bin counts in it, below the first one does not count. One pass.
    """
    counts = np.zeros(bins, np.int64)
    _select.count_bins(_bits(values), first, shift, counts)
    return counts


def keep_largest(values: Any, budget: int) -> Array:
    """Mask of the `budget` values of largest magnitude, ties to the first, zeros never."""
    keep = np.empty(len(values), np.bool_)
    _select.keep_largest(_bits(values), budget, keep)
    return keep


def part_largest(indices: Any, values: Any, budget: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The `budget` entries of largest magnitude, ties to the first, zeros never; and the others. Both keep their order.

    There must be more entries than the budget.
    """
    places, amounts = array(indices), array(values)
    kept, others = ((np.empty(room + 1, np.int32), np.empty(room + 1, np.float32)) for room in (budget, places.size))
    count = _select.part_largest(places, amounts, amounts.view(np.uint32), budget, *kept, *others)
    return _entries(*kept, count), _entries(*others, places.size - count)


def put_only(out: Tensor, positions: Any, values: Any) -> None:
    """Make `out` (flat, float32) zero everywhere but at these positions, which ascend."""
    _order.put_only(out.numpy(), array(positions), array(values))


def scatter_add(
    acc: Any,
    firsts: Ints,
    counts: Ints,
    indices: Any,
    values: Any,
    ids: Ints | None = None,
    shortlist: Shortlist | None = None,
) -> None:
    """Add entries to their blocks; indices are unique within a block. The `shortlist` learns of what became large."""
    if shortlist is None or ids is None:
        ids, shortlist = np.arange(firsts.size), Shortlist(firsts.size)
        shortlist.give_up()
    blocks = (ids, firsts, counts)
    lows = shortlist.lows.view(np.float32)
    _sparse.scatter_add(array(acc), *blocks, array(indices), array(values), lows, *shortlist.lists)


def fade(memory: Any, firsts: Ints, counts: Ints, indices: Any, values: Any, share: float) -> None:
    """Multiply the entries at these places by share * |entry| / |value|, if that is less than one."""
    _sparse.fade(array(memory), firsts, counts, array(indices), array(values), np.float32(share))


def merge(left: Any, left_values: Any, right: Any, right_values: Any) -> tuple[Array, Array]:
    """Sum of two sparse vectors with ascending indices; entries that cancel to zero vanish."""
    room = len(left) + len(right) + 1
    indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
    given = (array(left), array(left_values), array(right), array(right_values))
    return _entries(indices, values, _sparse.merge(*given, indices, values))


def round_bf16(values: Any) -> tuple[Array, Array]:
    """Finite values as bf16, the largest finite one where they would overflow; and what rounding cost each."""
    given = array(values)
    codes, errors = np.empty(given.size, np.uint16), np.empty(given.size, np.float32)
    _values.round_bf16(given, given.view(np.uint32), codes, errors, errors.view(np.uint32))
    return codes, errors


def widen_bf16(codes: Array) -> Array:
    """As float32."""
    values = np.empty(codes.size, np.float32)
    _values.widen_bf16(codes, values.view(np.uint32))
    return values


def plan_gaps(counts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """How many low bits each block's gaps keep apart, and the most bits that its indices can then take."""
    widths, worst = np.empty_like(counts), np.empty_like(counts)
    _gaps.plan_gaps(counts, lengths, widths, worst)
    return widths, worst


def frame_room(form: Form, lengths: Ints, budgets: Ints) -> int:
    """The most bytes that a frame for blocks of these lengths and budgets can have."""
    return int(_frames.frame_room(lengths, budgets, form.value_bytes, form.scaled, form.raw))


def write_frame(
    form: Form,
    poisoned: bool,
    lengths: Ints,
    budgets: Ints,
    counts: Ints,
    scales: Array,
    codes: Array,
    indices: Array,
) -> Array:
    """The frame of these blocks, as bytes."""
    out = np.empty(frame_room(form, lengths, budgets), np.uint8)
    flags = form.flags | (POISONED_FLAG if poisoned else 0)
    entries = (scales.view(np.uint8), codes.view(np.uint8), indices, indices.view(np.uint8))
    return out[: _frames.write_frame(out, flags, form.raw, lengths, budgets, counts, *entries)]


def read_frame(frame: Any, form: Form, lengths: Ints, budgets: Ints) -> tuple[int, tuple[Ints, Array, Array, Array]]:
    """How many entries a frame has, or a verdict; and its counts, indices, codes and scales.

    Bytes behind the frame do not count.
    """
    room = sum(budgets.tolist())
    counts, scales = np.empty(budgets.size, np.int64), np.empty(budgets.size if form.scaled else 0, np.float32)
    codes = np.empty(room if form.value_bytes else 0, _WORDS[form.kind])
    indices = np.empty(room, np.int32)
    words = codes.view(np.uint16) if form.exponents else _NO_CODES
    out = (counts, scales.view(np.uint8), codes.view(np.uint8), words, indices, indices.view(np.uint8))
    expected = (form.flags, form.raw, form.value_bytes, form.exponents, lengths, budgets)
    found = int(_frames.read_frame(array(frame), *expected, *out))
    entries = max(0, found)
    return found, (counts, indices[:entries], codes[:entries], scales)
