"""Kernels for CPU tensors: torch signatures over the loops that numba compiled. `portable.py` has the same names.

`firsts` and `stops` bound blocks in the accumulator's own order; `starts` and `chunk` describe how natural order is
dealt to blocks (blocks.py). Counts, budgets and bounds are small host arrays on every device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.kernels import _compiled as loops
from spardl.kernels import _gaps as gap_loops

Ints = NDArray[np.int64]


def _bits(values: Tensor) -> NDArray[np.uint32]:
    return values.numpy().view(np.uint32)


def _key(threshold: float) -> np.uint32:
    """The smallest key that counts as `threshold` or more; never that of zero."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite: nothing is that large
        return max(np.float32(abs(threshold)).view(np.uint32), np.uint32(1))


def all_finite(values: Tensor) -> bool:
    """True if no value is infinite or NaN. One read of `values`."""
    return bool(loops.all_finite(_bits(values)))


def accumulate(acc: Tensor, starts: Ints, chunk: int, offset: int, gradient: Tensor, scale: float) -> None:
    """Add `scale * gradient`, which begins at natural position `offset`; `gradient` becomes what `acc` held before."""
    loops.accumulate(acc.numpy(), starts, chunk, offset, gradient.numpy(), np.float32(scale))


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
) -> None:
    """Like `accumulate`, for momentum SGD's direction: g' = scale*g + decay*w, v' = momentum*v + damping*g'.

    Adds v', or g' + momentum*v' for Nesterov. v' goes to `updated`; `velocity` stays as it was.
    """
    loops.accumulate_momentum(
        acc.numpy(),
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
    )


def read(acc: Tensor, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
    """Copy `out.numel()` elements from natural position `offset` on into `out`."""
    loops.read(acc.numpy(), starts, chunk, offset, out.numpy())


def write(acc: Tensor, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
    """Copy `source` to natural positions from `offset` on."""
    loops.write(acc.numpy(), starts, chunk, offset, source.numpy())


def to_natural_order(starts: Ints, chunk: int, counts: Ints, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Natural positions (int64, ascending) and values of entries given for all blocks, block by block."""
    positions = torch.empty(indices.numel(), dtype=torch.int64)
    ordered = torch.empty_like(values)
    loops.to_natural_order(starts, chunk, counts, indices.numpy(), values.numpy(), positions.numpy(), ordered.numpy())
    return positions, ordered


def take_largest(acc: Tensor, firsts: Ints, stops: Ints, budgets: Ints) -> tuple[Ints, Tensor, Tensor]:
    """Move the `budgets[b]` entries of largest magnitude out of each block; they become zero there.

    Exact: ties go to the lowest index, zeros are never taken. Two passes over a block: a histogram of the leading bits
    finds the bin that holds the last wanted magnitude, a sweep collects what lies in or above it, and that short list
    is settled bit by bit. Returns counts, indices relative to the block (ascending) and values.
    """
    room = int(np.minimum(budgets, stops - firsts).clip(min=0).sum())
    counts = np.zeros(firsts.size, np.int64)
    indices = torch.empty(room, dtype=torch.int32)
    values = torch.empty(room, dtype=torch.float32)
    loops.take_largest(acc.numpy(), _bits(acc), firsts, stops, budgets, counts, indices.numpy(), values.numpy())
    total = int(counts.sum())
    return counts, indices[:total], values[:total]


def take_above(acc: Tensor, first: int, stop: int, threshold: float, limit: int) -> tuple[Tensor, Tensor]:
    """Move entries of magnitude `threshold` or more, the first `limit` of them, out of `acc[first:stop]`. One pass."""
    room = max(0, min(limit, stop - first))
    indices = torch.empty(room, dtype=torch.int32)
    values = torch.empty(room, dtype=torch.float32)
    taken = loops.take_above(acc.numpy(), _bits(acc), first, stop, _key(threshold), indices.numpy(), values.numpy())
    return indices[:taken], values[:taken]


def count_above(values: Tensor, threshold: float) -> int:
    """How many values have magnitude `threshold` or more; zeros never count."""
    return int(loops.count_above(_bits(values), _key(threshold)))


def count_bins(values: Tensor, first: int, shift: int, bins: int) -> Ints:
    """How many magnitudes lie in each of `bins` bins of 2**shift float32 bit patterns, from bin `first` up.

    Above the last bin counts in it, below the first one does not count. One pass.
    """
    counts = np.zeros(bins, np.int64)
    loops.count_bins(_bits(values), first, shift, counts)
    return counts


def keep_largest(values: Tensor, budget: int) -> Tensor:
    """Mask of the `budget` values of largest magnitude, ties to the first, zeros never."""
    keep = torch.empty(values.numel(), dtype=torch.bool)
    loops.keep_largest(_bits(values), budget, keep.numpy())
    return keep


def scatter_add(acc: Tensor, firsts: Ints, counts: Ints, indices: Tensor, values: Tensor) -> None:
    """Add entries to their blocks; indices are unique within a block."""
    loops.scatter_add(acc.numpy(), firsts, counts, indices.numpy(), values.numpy())


def merge(left: Tensor, left_values: Tensor, right: Tensor, right_values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of two sparse vectors with ascending indices; entries that cancel to zero vanish."""
    room = left.numel() + right.numel()
    indices = torch.empty(room, dtype=torch.int32)
    values = torch.empty(room, dtype=torch.float32)
    total = loops.merge(
        left.numpy(), left_values.numpy(), right.numpy(), right_values.numpy(), indices.numpy(), values.numpy()
    )
    return indices[:total], values[:total]


def plan_gaps(counts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """How many low bits each block's gaps keep apart, and the most bits that its indices can then take."""
    widths, worst = np.empty_like(counts), np.empty_like(counts)
    gap_loops.plan_gaps(np.ascontiguousarray(counts), np.ascontiguousarray(lengths), widths, worst)
    return widths, worst


def write_gaps(room: int, low_bits: Ints, counts: Ints, indices: Tensor) -> Tensor:
    """The bytes (at most `room`) of the Rice-coded gaps between ascending indices, block after block."""
    out = torch.zeros(room, dtype=torch.uint8)
    bits = gap_loops.write_gaps(out.numpy(), low_bits, counts, indices.numpy())
    return out[: (bits + 7) // 8]


def read_gaps(data: Tensor, low_bits: Ints, counts: Ints, lengths: Ints) -> Tensor | None:
    """Undo `write_gaps`; None unless `data` holds exactly these counts with every index inside its block."""
    indices = torch.empty(int(counts.sum()), dtype=torch.int32)
    bits = gap_loops.read_gaps(data.numpy(), low_bits, counts, lengths, indices.numpy())
    return indices if bits >= 0 and (bits + 7) // 8 == data.numel() else None
