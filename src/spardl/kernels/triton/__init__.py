"""The kernels of CUDA devices where Triton is installed: hot passes in Triton (`loops.py`), the rest in plain torch.

What is left to torch are sorts, running sums, copies, casts and scatters of entries, which are single tuned kernels
there, and Rice codes (docs/gpu.md says which).

Their bits are those of the other kernels: seen in Triton's interpreter, on a CPU. For GPUs they have been compiled, and
never run, by us (docs/gpu.md).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spardl.host import Count, Flag, download, spread, upload
from spardl.kernels.api import Bools, Ints
from spardl.kernels.torch import TorchKernels
from spardl.kernels.triton import launching, loops
from spardl.kernels.triton.frames import TritonPasses
from spardl.kernels.triton.launching import over, over_blocks
from spardl.kernels.triton.loops import TILE
from spardl.wire.format import UNITS, LevelFormat, ScaledFormat, ValueFormat, owners

KEYS = 2**31 - 1  # no magnitude is larger
DIGITS = (24, 16, 8, 0)  # where each digit of 8 bits of a magnitude begins


class TritonKernels(TorchKernels):
    """One object serves all CUDA devices, and in Triton's interpreter the CPU."""

    passes = TritonPasses()

    def accumulate(
        self,
        acc: Tensor,
        starts: Ints,
        chunk: int,
        offset: int,
        gradient: Tensor,
        scale: float,
        wanted: Bools,
        shortlist: None = None,
    ) -> Flag:
        place, flag = _place(starts, chunk, offset, gradient, wanted)
        if gradient.numel():
            launching.launch(loops.accumulate, over(gradient.numel()), acc, gradient, *place, float(scale))
        return flag[0] != 0

    def differ(
        self,
        acc: Tensor,
        starts: Ints,
        chunk: int,
        offset: int,
        shared: Tensor,
        own: Tensor,
        wanted: Bools,
        shortlist: None = None,
    ) -> Flag:
        place, flag = _place(starts, chunk, offset, own, wanted)
        if own.numel():
            launching.launch(loops.differ, over(own.numel()), acc, shared, own, *place)
        return flag[0] != 0

    def accumulate_momentum(
        self,
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
        shortlist: None = None,
    ) -> Flag:
        place, flag = _place(starts, chunk, offset, gradient, wanted)
        if gradient.numel():
            memory = (acc, velocity, updated, gradient, weights)
            rule = (int(nesterov), float(scale), float(momentum), float(decay), float(damping))
            launching.launch(loops.accumulate_momentum, over(gradient.numel()), *memory, *place, *rule)
        return flag[0] != 0

    def _take_full(self, acc: Tensor, firsts: Ints, stops: Ints, counts: Ints) -> tuple[Tensor, Tensor]:
        total, device = int(counts.sum()), acc.device
        indices = torch.empty(total, dtype=torch.int32, device=device)
        taken = torch.empty(total, dtype=acc.dtype, device=device)
        if not total:
            return indices, taken
        given, out = _find_largest(acc, firsts, stops, counts), (indices, taken)
        starts = upload(counts.cumsum() - counts, device)
        launching.launch(loops.take_chosen, given.grid, acc, *given.told, starts, *out, given.grid[0])
        return indices, taken

    def take_above(
        self, acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: None = None
    ) -> tuple[Tensor, Tensor]:
        """Waits once, for their number; not at all if these kernels fill."""
        block, threshold = acc[first:stop], abs(threshold)
        if not block.numel():
            return super().take_above(acc, first, stop, threshold, limit)
        counts = torch.empty(over(block.numel()), dtype=torch.int64, device=acc.device)
        launching.launch(loops.count_above, over(block.numel()), block, counts, block.numel(), threshold)
        ends = counts.cumsum(0)
        found = max(0, limit if self.fills else min(limit, int(download(ends[-1]))))
        indices = torch.empty(found, dtype=torch.int32, device=acc.device)
        taken = torch.empty(found, dtype=acc.dtype, device=acc.device)
        if found:
            out = (ends - counts, indices, taken)
            launching.launch(loops.take_above, over(block.numel()), block, *out, block.numel(), found, threshold)
        return indices, taken

    def count_above(self, values: Tensor, threshold: float, shortlist: None = None) -> Count:
        counts = torch.zeros(over(values.numel()), dtype=torch.int64, device=values.device)
        if values.numel():
            launching.launch(loops.count_above, over(values.numel()), values, counts, values.numel(), abs(threshold))
        return counts.sum()

    def count_bins(self, values: Tensor, first: int, shift: int, bins: int) -> Tensor:
        counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
        if values.numel():
            given = (values, counts, first, shift, bins, values.numel())
            launching.launch(loops.count_bins, over(values.numel()), *given)
        return counts

    def keep_largest(self, values: Tensor, budget: int) -> Tensor:
        if not 0 < budget < values.numel():
            return super().keep_largest(values, budget)
        values = values.contiguous()
        marks = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
        given = _find_largest(values, *_one_block(values, budget))
        launching.launch(loops.mark_chosen, given.grid, values, *given.told, marks, given.grid[0])
        kept = marks.view(torch.bool)
        return kept if self.fills else kept & (values != 0)

    def part_largest(
        self, indices: Tensor, values: Tensor, budget: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Waits as in torch, only if these kernels do not fill."""
        if not self.fills or not 0 < budget < values.numel():
            return super().part_largest(indices, values, budget)
        values = values.contiguous()
        given, indices = _find_largest(values, *_one_block(values, budget)), indices.contiguous()
        places, amounts = torch.empty_like(indices), torch.empty_like(values)
        entries = (indices, places, amounts)
        launching.launch(loops.part_chosen, given.grid, values, *given.told, *entries, budget, given.grid[0])
        return (places[:budget], amounts[:budget]), (places[budget:], amounts[budget:])

    def merge(
        self, left: Tensor, left_values: Tensor, right: Tensor, right_values: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Waits once, for their number; not at all if these kernels fill."""
        lefts, rights, device = left.numel(), right.numel(), left.device
        kept = min(lefts + rights, length)
        indices = torch.arange(kept, dtype=torch.int32, device=device)
        values = torch.zeros(kept, dtype=left_values.dtype, device=device)
        if kept:
            left, right = left.contiguous(), right.contiguous()
            sizes = (lefts, rights, max(lefts, rights).bit_length())
            paired = torch.zeros(lefts + 1, dtype=torch.int64, device=device)
            if lefts and rights:
                launching.launch(loops.find_pairs, over(lefts), left, right, paired, *sizes)
            given = (left, left_values.contiguous(), right, right_values.contiguous())
            out = (paired.cumsum(0), indices, values)
            launching.launch(loops.merge, over(lefts + rights), *given, *out, *sizes)
        if self.fills:
            return indices, values
        found = (values != 0).nonzero().flatten()
        return indices[found], values[found]

    def scatter_add(
        self,
        acc: Tensor,
        firsts: Ints,
        counts: Ints,
        indices: Tensor,
        values: Tensor,
        ids: Ints | None = None,
        shortlist: None = None,
    ) -> None:
        if values.numel():
            begins = spread(firsts, counts, acc.device)
            given = (indices.contiguous(), values.contiguous())
            launching.launch(loops.scatter_add, over(values.numel()), acc, begins, *given, values.numel())

    def round_bf16(self, values: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
        errors = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        if values.numel():
            launching.launch(loops.round_bf16, over(values.numel()), values.contiguous(), codes, errors, values.numel())
        return codes.view(torch.bfloat16), errors

    def encode(self, form: ValueFormat, values: Tensor, counts: Ints) -> tuple[Tensor, Tensor]:
        size, device = values.numel(), values.device
        if not size or not (form.name == "fp16" or isinstance(form, ScaledFormat) or _has_levels(form)):
            return super().encode(form, values, counts)
        values = values.contiguous()
        if isinstance(form, LevelFormat):
            codes = torch.empty(size, dtype=torch.int8, device=device)
            scales = torch.empty(form.scales_of(counts), dtype=torch.float32, device=device)
            ends = [float(np.float32(end) * np.float32(UNITS)) for end in form.guess]
            rule = (form.per_scale, form.levels, *ends)
            grid, blocks = over_blocks(counts, form.per_scale), _rows(form, counts, device)
            launching.launch(loops.round_levels, grid, values, blocks, codes, scales.view(torch.int32), *rule)
            return codes, scales
        if not isinstance(form, ScaledFormat):
            codes = torch.empty(size, dtype=torch.int16, device=device)
            launching.launch(loops.round_fp16, over(values.numel()), values, codes, size)
            return codes.view(form.dtype), values[:0]
        owner = owners(counts, device)
        keys = torch.zeros(len(counts), dtype=torch.int32, device=device)
        launching.launch(loops.find_largest, over(values.numel()), values, owner, keys, size)
        scales, codes = form.scales_for(keys.view(torch.float32)), torch.empty(size, dtype=torch.int8, device=device)
        launching.launch(
            loops.round_steps, over(values.numel()), values, owner, scales, codes, size, float(form.levels)
        )
        return codes, scales

    def decode(self, form: ValueFormat, codes: Tensor, scales: Tensor, counts: Ints) -> Tensor:
        if not codes.numel() or not (isinstance(form, ScaledFormat) or _has_levels(form)):
            return super().decode(form, codes, scales, counts)
        values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        if isinstance(form, LevelFormat):
            grid, blocks = over_blocks(counts, form.per_scale), _rows(form, counts, codes.device)
            words = scales.contiguous().view(torch.int32)
            rule = (form.per_scale, form.levels)
            launching.launch(loops.widen_levels, grid, codes.contiguous(), blocks, words, values, *rule)
            return values
        given = (codes.contiguous(), owners(counts, codes.device), scales.contiguous())
        launching.launch(loops.widen_steps, over(codes.numel()), *given, values, codes.numel())
        return values


def _place(
    starts: Ints, chunk: int, offset: int, values: Tensor, wanted: Bools
) -> tuple[tuple[Tensor | int, ...], Tensor]:
    """What a loop is told of where `values`, which begin at natural position `offset`, lie in block order; and its flag
    (which is among that), 1 until it finds something that is not finite."""
    flag = torch.ones(1, dtype=torch.int8, device=values.device)
    blocks = upload(starts, values.device), upload(wanted.astype("int8"), values.device)
    return (*blocks, flag, offset, values.numel(), chunk, wanted.size), flag


class _Largest(NamedTuple):
    """Where loops go that move what is chosen, and what they are told of it: of each block where it lies, its last key
    and how many that equal it are needed; of each tile how many are above it, and equal it, in tiles before."""

    grid: tuple[int, int]
    told: tuple[Tensor, ...]


def _find_largest(values: Tensor, firsts: Ints, stops: Ints, counts: Ints) -> _Largest:
    """Find the last key that each block chooses, digit by digit."""
    device, grid, launch = values.device, over_blocks(stops - firsts), launching.launch
    wanted, first, stop = upload(np.stack((counts, firsts, stops)), device)
    lasts, needed = torch.zeros_like(wanted), wanted.clone()
    found = torch.zeros(len(DIGITS), counts.size, 256, dtype=torch.int32, device=device)
    for digits, shift in zip(found, DIGITS, strict=True):
        launch(loops.count_digits, grid, values, first, stop, lasts, digits, shift)
        launch(loops.next_digit, (counts.size,), digits, lasts, needed)
    lasts = lasts.where(wanted > 0, KEYS)  # who wants none finds none
    above, ties = torch.zeros(2, *grid[::-1], dtype=torch.int64, device=device)
    launch(loops.count_chosen, grid, values, first, stop, lasts, above, ties, grid[0])
    return _Largest(grid, (first, stop, lasts, needed, above.cumsum(1) - above, ties.cumsum(1) - ties))


def _one_block(values: Tensor, budget: int) -> tuple[Ints, Ints, Ints]:
    """Where the only block lies, and how many entries of it are chosen."""
    return np.array([0]), np.array([values.numel()]), np.array([budget])


def _has_levels(form: ValueFormat) -> bool:
    """Whether values become levels, of which a scale serves as few as one program can hold."""
    return isinstance(form, LevelFormat) and form.per_scale <= 2 * TILE


def _rows(form: ValueFormat, counts: Ints, device: torch.device) -> Tensor:
    """The three numbers of each block that loops over levels need."""
    scales = form.scale_counts(counts)
    return upload(np.stack((counts.cumsum() - counts, counts, scales.cumsum() - scales), 1), device)
