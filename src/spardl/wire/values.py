"""Value formats on the wire. Every format says how to round, so that the sender can keep its own rounding error."""

import numpy as np
import torch
from torch import Tensor

from spardl.config import Values
from spardl.sparse import Ints

CODE_TYPES: dict[Values, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}


# Of the upper 16 bits, those that are all set in infinities and NaN.
EXPONENTS = {torch.float32: 0x7F80, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

# Times any 8-bit code it is still finite.
LARGEST_SCALE = torch.finfo(torch.float32).max / 128


def encode(values: Tensor, counts: Ints, form: Values) -> tuple[Tensor, Tensor]:
    """Codes of `values` and, for int8, one scale per block. What would overflow is the largest finite value.

    Infinities and NaN stay what they are, so that whoever decodes sees them.
    """
    dtype = CODE_TYPES[form]
    if form == "fp32":
        return values, values[:0]
    if form != "int8":
        return _saturate(values, torch.finfo(dtype).max).to(dtype), values[:0]
    owner = _owner(counts, values.device)
    largest = torch.zeros(len(counts), device=values.device)
    largest.scatter_reduce_(0, owner, values.abs(), "amax")
    scales = _saturate(largest / 127, LARGEST_SCALE)
    steps = scales[owner]
    codes = torch.where(steps > 0, values / steps, 0).round().clamp(-127, 127)
    return codes.to(dtype), scales


def scales_are_fine(scales: Tensor) -> bool:
    """Whether every value that finite codes decode to with these is finite."""
    return bool((scales.abs() <= LARGEST_SCALE).all())


def decode(codes: Tensor, scales: Tensor, counts: Ints) -> Tensor:
    """The float32 values that every rank computes with."""
    if codes.dtype is torch.int8:
        return codes.float() * scales[_owner(counts, codes.device)]
    return codes.float()


def _saturate(values: Tensor, limit: float) -> Tensor:
    return torch.where(values.isinf(), values, values.clamp(-limit, limit))


def _owner(counts: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)
