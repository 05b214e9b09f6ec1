"""Kernels for CPU tensors: torch signatures over the loops that numba compiled. `portable.py` has the same names.

`firsts` and `stops` bound blocks in the accumulator's own order; `starts` and `chunk` describe how natural order is
dealt to blocks (blocks.py). Counts, budgets and bounds are small host arrays on every device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.kernels import _frames, _gaps, _order, _select, _sparse, _values
from spardl.kernels.shortlist import Shortlist

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The allocator returns freed memory to the system above a threshold that follows the largest block it has freed so far.
# One large block, never touched, spares every step the page faults of getting its buffers anew.
np.empty(31 << 20, np.uint8)

_NOTHING = np.empty(0, np.uint8)
_NO_CODES = np.empty(0, np.uint16)


def _bits(values: Tensor) -> NDArray[np.uint32]:
    return values.numpy().view(np.uint32)


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
    positions = torch.empty(indices.numel(), dtype=torch.int64)
    ordered = torch.empty_like(values)
    _order.to_natural_order(starts, chunk, counts, indices.numpy(), values.numpy(), positions.numpy(), ordered.numpy())
    return positions, ordered


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
    values = torch.empty(_select.room_for(firsts, stops, budgets) + 1)
    counts, indices, _ = _take(acc, firsts, stops, budgets, ids, shortlist, values.numpy(), _NO_CODES)
    return counts, indices, values[: indices.numel()]


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
    codes = torch.empty(room, dtype=torch.bfloat16)
    values, words = np.empty(room, np.float32), codes.view(torch.uint16).numpy()
    counts, indices, fine = _take(acc, firsts, stops, budgets, ids, shortlist, values, words)
    return counts, indices, codes[: indices.numel()], fine


def _take(
    acc: Tensor,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None,
    shortlist: Shortlist | None,
    values: NDArray[np.float32],
    codes: NDArray[np.uint16],
) -> tuple[Ints, Tensor, bool]:
    counts = np.zeros(firsts.size, np.int64)
    indices = torch.empty(values.size, dtype=torch.int32)
    if shortlist is None or ids is None:
        ids, shortlist = np.arange(firsts.size), Shortlist(firsts.size)
    sums = acc.numpy()
    blocks = (ids, firsts, stops, budgets, counts, indices.numpy(), values, values.view(np.uint32), codes)
    listing = (shortlist.lows, *shortlist.lists, shortlist.amounts.view(np.uint32))
    noted = (shortlist.next_lows, shortlist.wanted)
    fine = _select.take_largest(sums, sums.view(np.uint32), *blocks, *listing, *noted)
    return counts, indices[: int(counts.sum())], bool(fine)


def take_above(
    acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: Shortlist | None = None
) -> tuple[Tensor, Tensor]:
    """Move entries of magnitude `threshold` or more, the first `limit` of them, out of `acc[first:stop]`.

    One pass, or none where the `shortlist`, which then is one of all of `acc`, reaches down to the threshold.
    """
    room = max(0, min(limit, stop - first))
    indices = torch.empty(room, dtype=torch.int32)
    values = torch.empty(room, dtype=torch.float32)
    key = _key(threshold)
    listed = shortlist.down_to(key) if shortlist is not None else None
    if listed is None:
        taken = _select.take_above(acc.numpy(), _bits(acc), first, stop, key, indices.numpy(), values.numpy())
    else:
        places, amounts = listed
        found = (places, amounts, amounts.view(np.uint32))
        taken = _select.take_listed(acc.numpy(), first, stop, key, *found, indices.numpy(), values.numpy())
    if shortlist is not None:
        shortlist.give_up()
        shortlist.expect_above(key, taken * acc.numel() // max(1, stop - first))
    return indices[:taken], values[:taken]


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
    keep = torch.empty(values.numel(), dtype=torch.bool)
    _select.keep_largest(_bits(values), budget, keep.numpy())
    return keep


def part_largest(indices: Tensor, values: Tensor, budget: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The `budget` entries of largest magnitude, ties to the first, zeros never; and the others. Both keep their order.

    There must be more entries than the budget.
    """
    kept, others = torch.empty(budget + 1, dtype=torch.int32), indices.new_empty(indices.numel() + 1)
    kept_values, other_values = torch.empty(budget + 1), values.new_empty(values.numel() + 1)
    outputs = (kept.numpy(), kept_values.numpy(), others.numpy(), other_values.numpy())
    count = _select.part_largest(indices.numpy(), values.numpy(), _bits(values), budget, *outputs)
    rest = indices.numel() - count
    return (kept[:count], kept_values[:count]), (others[:rest], other_values[:rest])


def put_only(out: Tensor, positions: Tensor, values: Tensor) -> None:
    """Make `out` (flat, float32) zero everywhere but at these positions."""
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
    indices = torch.empty(room, dtype=torch.int32)
    values = torch.empty(room, dtype=torch.float32)
    total = _sparse.merge(
        left.numpy(), left_values.numpy(), right.numpy(), right_values.numpy(), indices.numpy(), values.numpy()
    )
    return indices[:total], values[:total]


def round_bf16(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finite values as bf16, the largest finite one where they would overflow; and what rounding cost each."""
    codes, errors = torch.empty(values.numel(), dtype=torch.bfloat16), torch.empty_like(values)
    out = (codes.view(torch.uint16).numpy(), errors.numpy(), _bits(errors))
    _values.round_bf16(values.numpy(), _bits(values), *out)
    return codes, errors


def plan_gaps(counts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """How many low bits each block's gaps keep apart, and the most bits that its indices can then take."""
    widths, worst = np.empty_like(counts), np.empty_like(counts)
    _gaps.plan_gaps(counts, lengths, widths, worst)
    return widths, worst


def frame_room(lengths: Ints, budgets: Ints, value_bytes: int, scaled: bool, raw: bool) -> int:
    """The most bytes that a frame for blocks of these lengths and budgets can have."""
    return int(_frames.frame_room(lengths, budgets, value_bytes, scaled, raw))


def write_frame(
    out: Tensor,
    version: int,
    flags: int,
    raw: bool,
    lengths: Ints,
    budgets: Ints,
    counts: Ints,
    scales: Tensor,
    codes: Tensor,
    indices: Tensor,
) -> int:
    """Write a frame into `out`, which has room for it; how many bytes that took."""
    places = indices.numpy()
    blocks = (lengths, budgets, counts, _octets(scales), _octets(codes), places, places.view(np.uint8))
    return int(_frames.write_frame(out.numpy(), version, flags, raw, *blocks))


def read_frame(
    frame: Tensor,
    raw: bool,
    exponents: int,
    lengths: Ints,
    budgets: Ints,
    counts: Ints,
    scales: Tensor,
    codes: Tensor,
    indices: Tensor,
) -> int:
    """Read a frame whose header has been checked; how many entries it has, or a verdict.

    Fills counts and scales, and codes and indices, which have room for all that a frame may hold, as far as it goes.
    `exponents` are the upper bits of a code that are all set if it is not finite; 0 for codes that are always finite.
    """
    places, octets = indices.numpy(), _octets(codes)
    words = octets.view(np.uint16) if exponents else _NO_CODES
    blocks = (lengths, budgets, counts, _octets(scales), octets, words, places, places.view(np.uint8))
    form = (raw, codes.itemsize if codes.numel() else 0, np.uint16(exponents))
    return int(_frames.read_frame(frame.numpy(), *form, *blocks))


def _octets(values: Tensor) -> NDArray[np.uint8]:
    """The memory of these values."""
    return values.view(torch.uint8).numpy() if values.numel() else _NOTHING
