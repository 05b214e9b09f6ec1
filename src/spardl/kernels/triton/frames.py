"""What frames need done to their entries, in Triton: values in few bits, indices in the fixed code, heads and verdicts.

Scales and codes of 8 bits and more are copied by torch, and Rice codes, which have to be read one after the other and
are not the default on a device, are torch's.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import Flag, upload
from spardl.kernels.api import CodedEntries, Ints
from spardl.kernels.torch_frames import Passes, as_bytes, fixed_size, plan_gaps
from spardl.kernels.triton import launching, loops
from spardl.kernels.triton.launching import over, over_blocks
from spardl.wire.format import (
    ASTRAY,
    FOREIGN,
    NOT_FINITE,
    OTHER_COUNTS,
    POISONED,
    POISONED_FLAG,
    TOO_SHORT,
    FrameFormat,
)

REFUSALS = (NOT_FINITE, ASTRAY, NOT_FINITE, TOO_SHORT, OTHER_COUNTS, POISONED, FOREIGN)  # as `judge` finds them


class TritonPasses(Passes):
    def pack_codes(self, codes: Tensor, bits: int) -> Tensor:
        if bits >= 8 or not codes.numel():
            return super().pack_codes(codes, bits)
        size = (codes.numel() * bits + 7) // 8
        data = torch.empty(size, dtype=torch.uint8, device=codes.device)
        words = codes.contiguous().view(torch.int8)
        launching.launch(loops.pack_codes, over(size), words, data, codes.numel(), size, bits)
        return data

    def unpack_codes(self, data: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
        if bits >= 8 or not data.numel():
            return super().unpack_codes(data, count, bits, dtype)
        codes = torch.empty(count, dtype=torch.int8, device=data.device)
        sign = 1 << (bits - 1) if dtype.is_signed else 0
        launching.launch(loops.unpack_codes, over(count), data.contiguous(), codes, count, bits, sign)
        return codes.view(dtype)

    def write_head(self, out: Tensor, head: NDArray[np.uint8], poisoned: Flag) -> None:
        flag = poisoned if isinstance(poisoned, Tensor) else torch.full((), poisoned, device=out.device)
        given = (out, upload(head, out.device), flag.view(torch.int8))
        launching.launch(loops.write_head, over(head.size), *given, head.size, POISONED_FLAG)

    def judge(
        self,
        frame: Tensor,
        form: FrameFormat,
        head: Tensor,
        end: int,
        whole: Tensor | int,
        inside: Tensor,
        entries: CodedEntries[Tensor],
    ) -> tuple[Tensor, CodedEntries[Tensor]]:
        """Frames that are fine are only read: what is refused is cleared in place."""
        counts, places, codes, scales = entries
        halves = codes.itemsize // 2
        if isinstance(whole, Tensor) or (form.values.not_finite and not halves):
            return super().judge(frame, form, head, end, whole, inside, entries)
        device, launch = frame.device, launching.launch
        fine = torch.ones(2, dtype=torch.int8, device=device)
        if form.values.not_finite and codes.numel():
            pattern = form.values.not_finite >> (16 * (halves - 1))
            words = codes.view(torch.int16)
            launch(loops.check_codes, over(codes.numel()), words, fine, codes.numel(), halves, pattern)
        if scales.numel():
            largest = float(form.values.largest_scale)
            launch(loops.check_scales, over(scales.numel()), scales, fine[1:], scales.numel(), largest)
        verdict = torch.empty((), dtype=torch.int64, device=device)
        told = (inside.view(torch.int8), fine, fine[1:], verdict)
        sizes = (frame.numel(), head.numel(), end, whole, POISONED_FLAG)
        launch(loops.judge, (1,), frame.contiguous(), head, *told, *sizes, upload(np.array(REFUSALS), device))
        for part in (as_bytes(codes), as_bytes(scales)):
            if part.numel():
                launch(loops.clear, over(part.numel()), part, verdict, part.numel())
        if places.numel():
            blocks = upload(np.stack((counts.cumsum() - counts, counts), 1), device)
            launch(loops.clear_places, over_blocks(counts), places, blocks, verdict)
        return verdict, entries

    def write_fixed(self, counts: Ints, lengths: Ints, indices: Tensor) -> Tensor:
        size = fixed_size(counts, lengths)
        words = torch.zeros(size // 4 + 2, dtype=torch.int32, device=indices.device)  # one more for what is left over
        if indices.numel():
            blocks, _ = _plans(counts, lengths, indices.device)
            launching.launch(loops.write_fixed, over_blocks(counts), indices.contiguous(), blocks, words)
        return words.view(torch.uint8)[:size]

    def read_fixed(self, data: Tensor, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor]:
        total, device, launch = int(counts.sum()), data.device, launching.launch
        indices = torch.zeros(total, dtype=torch.int32, device=device)
        inside = torch.ones((), dtype=torch.int8, device=device)
        if not total:
            return indices, inside.view(torch.bool)
        words = torch.nn.functional.pad(data, (0, 8 - data.numel() % 4)).view(torch.int32)
        blocks, bits = _plans(counts, lengths, device)
        grid, sizes = over_blocks(bits), upload(bits, device)
        ones = torch.zeros(grid[::-1], dtype=torch.int64, device=device)
        launch(loops.count_ones, grid, words, blocks, sizes, ones, grid[0])
        ends = ones.cumsum(1)
        launch(loops.read_fixed, grid, words, blocks, sizes, ends - ones, indices, grid[0])
        found = (ends[:, -1].contiguous(), upload(lengths, device), inside)
        launch(loops.check_places, over_blocks(counts), indices, blocks, *found)
        return indices, inside.view(torch.bool)


def _plans(counts: Ints, lengths: Ints, device: torch.device) -> tuple[Tensor, Ints]:
    """The five numbers of each block that the loops need, and the bits of its stretch, on the host."""
    widths, bits = plan_gaps(counts, lengths)
    lows = bits.cumsum() - bits
    highs = lows + counts * widths
    return upload(np.stack((counts.cumsum() - counts, counts, widths, lows, highs), 1), device), bits - counts * widths
