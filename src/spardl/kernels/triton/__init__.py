"""The kernels of CUDA devices where Triton is installed: hot passes in Triton (`loops.py`), the rest in plain torch.

Their bits are those of the other kernels: seen in Triton's interpreter, on a CPU. For GPUs they have been compiled, and
never run, by us (docs/gpu.md).
"""

from typing import Any

import torch
from torch import Tensor

from spardl.host import Flag, download, upload
from spardl.kernels.api import Bools, Ints
from spardl.kernels.torch import TorchKernels
from spardl.kernels.triton import loops

TILE = 1024  # elements that one program of a kernel is about

# A product and a sum that are fused are rounded once instead of twice, and bits would differ from those of a CPU.
EXACTLY: dict[str, Any] = {"TILE": TILE, "enable_fp_fusion": False}


class TritonKernels(TorchKernels):
    """One object serves all CUDA devices, and in Triton's interpreter the CPU."""

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
        flag = torch.ones(1, dtype=torch.int8, device=acc.device)
        if gradient.numel():
            first, chosen = upload(starts, acc.device), upload(wanted.astype("int8"), acc.device)
            sizes = (offset, gradient.numel(), chunk, wanted.size, scale)
            loops.accumulate[_grid(gradient)](acc, gradient, first, chosen, flag, *sizes, **EXACTLY)
        return flag[0] != 0

    def take_above(
        self, acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: None = None
    ) -> tuple[Tensor, Tensor]:
        """Waits once, for their number."""
        block, threshold = acc[first:stop], abs(threshold)
        if not block.numel():
            return super().take_above(acc, first, stop, threshold, limit)
        counts = torch.empty(_grid(block), dtype=torch.int64, device=acc.device)
        loops.count_above[_grid(block)](block, counts, block.numel(), threshold, **EXACTLY)
        ends = counts.cumsum(0)
        found = min(max(0, limit), int(download(ends[-1])))
        indices = torch.empty(found, dtype=torch.int32, device=acc.device)
        taken = torch.empty(found, dtype=acc.dtype, device=acc.device)
        if found:
            out = (ends - counts, indices, taken)
            loops.take_above[_grid(block)](block, *out, block.numel(), found, threshold, **EXACTLY)
        return indices, taken

    def count_above(self, values: Tensor, threshold: float, shortlist: None = None) -> int:
        if not values.numel():
            return 0
        counts = torch.empty(_grid(values), dtype=torch.int64, device=values.device)
        loops.count_above[_grid(values)](values, counts, values.numel(), abs(threshold), **EXACTLY)
        return int(download(counts.sum()))

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
            spread = upload(firsts.repeat(counts), acc.device)
            given = (indices.contiguous(), values.contiguous())
            loops.scatter_add[_grid(values)](acc, spread, *given, values.numel(), **EXACTLY)

    def round_bf16(self, values: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
        errors = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        if values.numel():
            loops.round_bf16[_grid(values)](values.contiguous(), codes, errors, values.numel(), **EXACTLY)
        return codes.view(torch.bfloat16), errors


def _grid(values: Tensor) -> tuple[int]:
    """A program for each tile."""
    return (-(-values.numel() // TILE),)
