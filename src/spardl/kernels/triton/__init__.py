"""The kernels of CUDA devices where Triton is installed: hot passes in Triton (`loops.py`), the rest in plain torch.

Their bits are those of the other kernels: seen in Triton's interpreter, on a CPU. For GPUs they have been compiled, and
never run, by us (docs/gpu.md).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spardl.host import Count, Flag, download, spread, upload
from spardl.kernels.api import Bools, Ints
from spardl.kernels.torch import TorchKernels
from spardl.kernels.torch_frames import FixedCode, ascend, fixed_size, plan_gaps
from spardl.kernels.triton import loops
from spardl.kernels.triton.loops import OPTIONS, TILE
from spardl.wire.format import ScaledFormat, ValueFormat, owners

KEYS = 2**31 - 1  # no magnitude is larger
DIGITS = (24, 16, 8, 0)  # where each digit of 8 bits of a magnitude begins


def launch(loop: Any, grid: tuple[int, ...], *given: Tensor | int | float) -> None:
    """Run a program of this loop for each place of the grid. What kinds of numbers it is given is said here alone."""
    loop[grid](*given, TILE=TILE, **OPTIONS)


class TritonFixedCode(FixedCode):
    """Indices in the fixed code, all bits at once."""

    def write(self, counts: Ints, lengths: Ints, indices: Tensor) -> Tensor:
        size = fixed_size(counts, lengths)
        words = torch.zeros(size // 4 + 2, dtype=torch.int32, device=indices.device)  # one more for what is left over
        if indices.numel():
            blocks, _ = _plans(counts, lengths, indices.device)
            launch(loops.write_fixed, _tiles(counts), indices.contiguous(), blocks, words)
        return words.view(torch.uint8)[:size]

    def read(self, data: Tensor, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor]:
        total, device = int(counts.sum()), data.device
        indices = torch.zeros(total, dtype=torch.int64, device=device)
        if not total:
            return indices.int(), torch.ones((), dtype=torch.bool, device=device)
        words = torch.nn.functional.pad(data, (0, 8 - data.numel() % 4)).view(torch.int32)
        blocks, bits = _plans(counts, lengths, device)
        grid, sizes = _tiles(bits), upload(bits, device)
        ones = torch.zeros(grid[::-1], dtype=torch.int64, device=device)
        launch(loops.count_ones, grid, words, blocks, sizes, ones, grid[0])
        ends = ones.cumsum(1)
        launch(loops.read_fixed, grid, words, blocks, sizes, ends - ones, indices, grid[0])
        fine = (ends[:, -1] == blocks[:, 1]).all() & ascend(indices, counts, lengths)
        return indices.clamp(max=2**31 - 1).int(), fine


def _plans(counts: Ints, lengths: Ints, device: torch.device) -> tuple[Tensor, Ints]:
    """The five numbers of each block that the loops need, and the bits of its stretch, on the host."""
    widths, bits = plan_gaps(counts, lengths)
    lows = bits.cumsum() - bits
    highs = lows + counts * widths
    return upload(np.stack((counts.cumsum() - counts, counts, widths, lows, highs), 1), device), bits - counts * widths


class TritonKernels(TorchKernels):
    """One object serves all CUDA devices, and in Triton's interpreter the CPU."""

    fixed = TritonFixedCode()

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
            launch(loops.accumulate, _grid(gradient), acc, gradient, *place, float(scale))
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
            launch(loops.differ, _grid(own), acc, shared, own, *place)
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
            launch(loops.accumulate_momentum, _grid(gradient), *memory, *place, *rule)
        return flag[0] != 0

    def _take_full(self, acc: Tensor, firsts: Ints, stops: Ints, counts: Ints) -> tuple[Tensor, Tensor]:
        """Digit by digit the last key that each block chooses is found, and then all that are chosen are moved out."""
        total, device = int(counts.sum()), acc.device
        indices = torch.empty(total, dtype=torch.int32, device=device)
        taken = torch.empty(total, dtype=acc.dtype, device=device)
        if not total:
            return indices, taken
        grid = _tiles(stops - firsts)
        wanted, starts, first, stop = upload(np.stack((counts, counts.cumsum() - counts, firsts, stops)), device)
        lasts, needed = torch.zeros_like(wanted), wanted
        for shift in DIGITS:
            found = torch.zeros(len(counts), 256, dtype=torch.int32, device=device)
            launch(loops.count_digits, grid, acc, first, stop, lasts, found, shift)
            lasts, needed = _next_digit(lasts, needed, found.long())
        lasts = lasts.where(wanted > 0, KEYS)  # who wants none finds none
        above, ties = torch.zeros(2, *grid[::-1], dtype=torch.int64, device=device)
        launch(loops.count_chosen, grid, acc, first, stop, lasts, above, ties, grid[0])
        earlier = (above.cumsum(1) - above, ties.cumsum(1) - ties)
        launch(loops.take_chosen, grid, acc, first, stop, lasts, needed, *earlier, starts, indices, taken, grid[0])
        return indices, taken

    def take_above(
        self, acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: None = None
    ) -> tuple[Tensor, Tensor]:
        """Waits once, for their number; not at all if these kernels fill."""
        block, threshold = acc[first:stop], abs(threshold)
        if not block.numel():
            return super().take_above(acc, first, stop, threshold, limit)
        counts = torch.empty(_grid(block), dtype=torch.int64, device=acc.device)
        launch(loops.count_above, _grid(block), block, counts, block.numel(), threshold)
        ends = counts.cumsum(0)
        found = max(0, limit if self.fills else min(limit, int(download(ends[-1]))))
        indices = torch.empty(found, dtype=torch.int32, device=acc.device)
        taken = torch.empty(found, dtype=acc.dtype, device=acc.device)
        if found:
            out = (ends - counts, indices, taken)
            launch(loops.take_above, _grid(block), block, *out, block.numel(), found, threshold)
        return indices, taken

    def count_above(self, values: Tensor, threshold: float, shortlist: None = None) -> Count:
        counts = torch.zeros(_grid(values), dtype=torch.int64, device=values.device)
        if values.numel():
            launch(loops.count_above, _grid(values), values, counts, values.numel(), abs(threshold))
        return counts.sum()

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
            launch(loops.scatter_add, _grid(values), acc, begins, *given, values.numel())

    def round_bf16(self, values: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
        errors = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        if values.numel():
            launch(loops.round_bf16, _grid(values), values.contiguous(), codes, errors, values.numel())
        return codes.view(torch.bfloat16), errors

    def encode(self, form: ValueFormat, values: Tensor, counts: Ints) -> tuple[Tensor, Tensor]:
        size, device = values.numel(), values.device
        if not size or not (form.name == "fp16" or isinstance(form, ScaledFormat)):
            return super().encode(form, values, counts)
        values = values.contiguous()
        if not isinstance(form, ScaledFormat):
            codes = torch.empty(size, dtype=torch.int16, device=device)
            launch(loops.round_fp16, _grid(values), values, codes, size)
            return codes.view(form.dtype), values[:0]
        owner = owners(counts, device)
        keys = torch.zeros(len(counts), dtype=torch.int32, device=device)
        launch(loops.find_largest, _grid(values), values, owner, keys, size)
        scales, codes = form.scales_for(keys.view(torch.float32)), torch.empty(size, dtype=torch.int8, device=device)
        launch(loops.round_steps, _grid(values), values, owner, scales, codes, size, float(form.levels))
        return codes, scales

    def decode(self, form: ValueFormat, codes: Tensor, scales: Tensor, counts: Ints) -> Tensor:
        if not codes.numel() or not isinstance(form, ScaledFormat):
            return super().decode(form, codes, scales, counts)
        values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        given = (codes.contiguous(), owners(counts, codes.device), scales.contiguous())
        launch(loops.widen_steps, _grid(codes), *given, values, codes.numel())
        return values


def _place(
    starts: Ints, chunk: int, offset: int, values: Tensor, wanted: Bools
) -> tuple[tuple[Tensor | int, ...], Tensor]:
    """What a loop is told of where `values`, which begin at natural position `offset`, lie in block order; and its flag
    (which is among that), 1 until it finds something that is not finite."""
    flag = torch.ones(1, dtype=torch.int8, device=values.device)
    blocks = upload(starts, values.device), upload(wanted.astype("int8"), values.device)
    return (*blocks, flag, offset, values.numel(), chunk, wanted.size), flag


def _next_digit(prefixes: Tensor, needed: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """One more digit of each block's last key, and how many keys that begin like it are needed; `found` says how many
    go on with each digit."""
    above = found.flip(1).cumsum(1).flip(1) - found  # with a larger digit
    digit = (above >= needed[:, None]).sum(1).clamp(max=255)
    return prefixes * 256 + digit, needed - above.gather(1, digit[:, None]).flatten()


def _tiles(lengths: Ints) -> tuple[int, int]:
    """A program for each tile of the longest block, times blocks."""
    return max(1, -(-int(lengths.max(initial=0)) // TILE)), lengths.size


def _grid(values: Tensor) -> tuple[int]:
    """A program for each tile."""
    return (-(-values.numel() // TILE),)
