"""Kernels for CPU tensors: torch signatures over the loops that numba compiled. `portable.py` has the same names.

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

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The allocator returns freed memory to the system above a threshold that follows the largest block it has freed so far.
# One large block, never touched, spares every step the page faults of getting its buffers anew.
np.empty(31 << 20, np.uint8)

_NOTHING = np.empty(0, np.uint8)
_NO_CODES = np.empty(0, np.uint16)

# By size, since numpy has no name for bf16.
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype(np.int8), 2: np.dtype(np.uint16), 4: np.dtype(np.float32)}


def _bits(values: Tensor) -> NDArray[np.uint32]:
    return values.numpy().view(np.uint32)


def _entries(indices: NDArray[np.int32], values: NDArray[np.float32], count: int) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(indices[:count]), torch.from_numpy(values[:count])


def _key(threshold: float) -> np.uint32:
    """The smallest key that counts as `threshold` or more; never that of zero."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite: nothing is that large
        return max(np.float32(abs(threshold)).view(np.uint32), np.uint32(1))


def all_finite(values: Tensor) -> bool:
    """True if no value is infinite or NaN. One read of `values`."""
    return bool(_select.all_finite(_bits(values)))


def accumulate(
    acc: Tensor,
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
    return bool(_order.accumulate(acc.numpy(), _bits(acc), *place, *given, listing.lows, *listing.lists))


def accumulate_momentum(
    acc: Tensor,
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
        acc.numpy(),
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


def read(acc: Tensor, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
    """Copy `out.numel()` elements from natural position `offset` on into `out`."""
    _order.read(acc.numpy(), starts, chunk, offset, out.numpy())


def write(acc: Tensor, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
    """Copy `source` to natural positions from `offset` on."""
    _order.write(acc.numpy(), starts, chunk, offset, source.numpy())


def to_natural_order(starts: Ints, chunk: int, counts: Ints, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Natural positions (int64, ascending) and values of entries given for all blocks, block by block."""
    given = (indices.numpy(), values.numpy())
    positions, ordered = np.empty(given[0].size, np.int64), np.empty(given[0].size, np.float32)
    _order.to_natural_order(starts, chunk, counts, *given, positions, ordered)
    return torch.from_numpy(positions), torch.from_numpy(ordered)


def take_largest(
    acc: Tensor,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None = None,
    shortlist: Shortlist | None = None,
) -> tuple[Ints, Tensor, Tensor]:
    """Move the `budgets[b]` entries of largest magnitude out of each block; they become zero there.

    Exact: ties go to the lowest index, zeros are never taken. Where the `shortlist` of block `ids[b]` suffices, only it
    is looked at. Otherwise two passes over the block: a histogram of the leading bits finds the bin that holds the last
    wanted magnitude, a sweep collects what lies in or above it, and that short list is settled bit by bit.
    Returns counts, indices relative to the block (ascending) and values.
    """
    values = np.empty(_select.room_for(firsts, stops, budgets) + 1, np.float32)
    counts, indices, _ = _take(acc, firsts, stops, budgets, ids, shortlist, values, _NO_CODES)
    return counts, torch.from_numpy(indices), torch.from_numpy(values[: indices.size])


def take_rounded(
    acc: Tensor,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None = None,
    shortlist: Shortlist | None = None,
) -> tuple[Ints, Tensor, Tensor, bool]:
    """`take_largest`, but what is taken of each entry is the nearest bf16, the largest finite one where it would
    overflow; the rest stays. Says also whether all that was taken is finite."""
    room = _select.room_for(firsts, stops, budgets) + 1
    values, codes = np.empty(room, np.float32), np.empty(room, np.uint16)
    counts, indices, fine = _take(acc, firsts, stops, budgets, ids, shortlist, values, codes)
    return counts, torch.from_numpy(indices), torch.from_numpy(codes[: indices.size]).view(torch.bfloat16), fine


def _take(
    acc: Tensor,
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
    sums = acc.numpy()
    blocks = (ids, firsts, stops, budgets, counts, indices, values, values.view(np.uint32), codes)
    listing = (shortlist.lows, *shortlist.lists, shortlist.amounts.view(np.uint32))
    noted = (shortlist.next_lows, shortlist.wanted)
    taken, fine = _select.take_largest(sums, sums.view(np.uint32), *blocks, *listing, *noted)
    return counts, indices[:taken], bool(fine)


def take_above(
    acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: Shortlist | None = None
) -> tuple[Tensor, Tensor]:
    """Move entries of magnitude `threshold` or more, the first `limit` of them, out of `acc[first:stop]`.

    One pass, or none where the `shortlist`, which then is one of all of `acc`, reaches down to the threshold.
    """
    room = max(0, min(limit, stop - first))
    indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
    key = _key(threshold)
    listed = shortlist.down_to(key) if shortlist is not None else None
    if listed is None:
        taken = _select.take_above(acc.numpy(), _bits(acc), first, stop, key, indices, values)
    else:
        places, amounts = listed
        found = (places, amounts, amounts.view(np.uint32))
        taken = _select.take_listed(acc.numpy(), first, stop, key, *found, indices, values)
    if shortlist is not None:
        shortlist.give_up()
        shortlist.expect_above(key, taken * acc.numel() // max(1, stop - first))
    return _entries(indices, values, taken)


def count_above(values: Tensor, threshold: float, shortlist: Shortlist | None = None) -> int:
    """How many values have magnitude `threshold` or more; zeros never count."""
    key = _key(threshold)
    listed = shortlist.down_to(key) if shortlist is not None else None
    return int(_select.count_above(_bits(values) if listed is None else listed[1].view(np.uint32), key))


def count_bins(values: Tensor, first: int, shift: int, bins: int) -> Ints:
    """How many magnitudes lie in each of `bins` bins of 2**shift float32 bit patterns, from bin `first` up.

    Above the last bin counts in it, below the first one does not count. One pass.
    """
    counts = np.zeros(bins, np.int64)
    _select.count_bins(_bits(values), first, shift, counts)
    return counts


def keep_largest(values: Tensor, budget: int) -> Tensor:
    """Mask of the `budget` values of largest magnitude, ties to the first, zeros never."""
    keep = np.empty(values.numel(), np.bool_)
    _select.keep_largest(_bits(values), budget, keep)
    return torch.from_numpy(keep)


def part_largest(indices: Tensor, values: Tensor, budget: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The `budget` entries of largest magnitude, ties to the first, zeros never; and the others. Both keep their order.

    There must be more entries than the budget.
    """
    places, amounts = indices.numpy(), values.numpy()
    kept, others = ((np.empty(room + 1, np.int32), np.empty(room + 1, np.float32)) for room in (budget, places.size))
    count = _select.part_largest(places, amounts, amounts.view(np.uint32), budget, *kept, *others)
    return _entries(*kept, count), _entries(*others, places.size - count)


def put_only(out: Tensor, positions: Tensor, values: Tensor) -> None:
    """Make `out` (flat, float32) zero everywhere but at these positions, which ascend."""
    _order.put_only(out.numpy(), positions.numpy(), values.numpy())


def scatter_add(
    acc: Tensor,
    firsts: Ints,
    counts: Ints,
    indices: Tensor,
    values: Tensor,
    ids: Ints | None = None,
    shortlist: Shortlist | None = None,
) -> None:
    """Add entries to their blocks; indices are unique within a block. The `shortlist` learns of what became large."""
    if shortlist is None or ids is None:
        ids, shortlist = np.arange(firsts.size), Shortlist(firsts.size)
        shortlist.give_up()
    blocks = (ids, firsts, counts)
    lows = shortlist.lows.view(np.float32)
    _sparse.scatter_add(acc.numpy(), *blocks, indices.numpy(), values.numpy(), lows, *shortlist.lists)


def fade(memory: Tensor, firsts: Ints, counts: Ints, indices: Tensor, values: Tensor, share: float) -> None:
    """Multiply the entries at these places by share * |entry| / |value|, if that is less than one."""
    _sparse.fade(memory.numpy(), firsts, counts, indices.numpy(), values.numpy(), np.float32(share))


def merge(left: Tensor, left_values: Tensor, right: Tensor, right_values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of two sparse vectors with ascending indices; entries that cancel to zero vanish."""
    room = left.numel() + right.numel() + 1
    indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
    given = (left.numpy(), left_values.numpy(), right.numpy(), right_values.numpy())
    return _entries(indices, values, _sparse.merge(*given, indices, values))


def round_bf16(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finite values as bf16, the largest finite one where they would overflow; and what rounding cost each."""
    given = values.numpy()
    codes, errors = np.empty(given.size, np.uint16), np.empty(given.size, np.float32)
    _values.round_bf16(given, given.view(np.uint32), codes, errors, errors.view(np.uint32))
    return torch.from_numpy(codes).view(torch.bfloat16), torch.from_numpy(errors)


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
    scales: Tensor,
    codes: Tensor,
    indices: Tensor,
) -> Tensor:
    """The frame of these blocks, as bytes."""
    out, places = np.empty(frame_room(form, lengths, budgets), np.uint8), indices.numpy()
    flags = form.flags | (POISONED_FLAG if poisoned else 0)
    blocks = (lengths, budgets, counts, _octets(scales), _octets(codes), places, places.view(np.uint8))
    return torch.from_numpy(out[: _frames.write_frame(out, flags, form.raw, *blocks)])


def read_frame(
    frame: Tensor, form: Form, lengths: Ints, budgets: Ints
) -> tuple[int, tuple[Ints, Tensor, Tensor, Tensor]]:
    """How many entries a frame has, or a verdict; and its counts, indices, codes and scales.

    Bytes behind the frame do not count.
    """
    room = sum(budgets.tolist())
    counts, scales = np.empty(budgets.size, np.int64), np.empty(budgets.size if form.scaled else 0, np.float32)
    codes = np.empty(room if form.value_bytes else 0, _WORDS[form.kind.itemsize])
    indices = np.empty(room, np.int32)
    words = codes.view(np.uint16) if form.exponents else _NO_CODES
    out = (counts, scales.view(np.uint8), codes.view(np.uint8), words, indices, indices.view(np.uint8))
    expected = (form.flags, form.raw, form.value_bytes, np.uint16(form.exponents), lengths, budgets)
    found = int(_frames.read_frame(frame.numpy(), *expected, *out))
    entries = max(0, found)
    read = torch.from_numpy(codes[:entries]).view(form.kind)
    return found, (counts, torch.from_numpy(indices[:entries]), read, torch.from_numpy(scales))


def _octets(values: Tensor) -> NDArray[np.uint8]:
    """The memory of these values."""
    return values.view(torch.uint8).numpy() if values.numel() else _NOTHING
