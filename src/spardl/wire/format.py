"""What travels between ranks, byte by byte. This page is the only description of it; everything else asks it.

A **frame** holds sparse blocks: all that one rank sends to one other in one round, in one buffer (`frame.py` checks
and uses it, the kernels of each device write and read it).

    byte 0        VERSION
    byte 1        flags: bits 0-2 the value format's code, bit 3 raw indices, bit 4 poisoned
    bytes 2-3     number of blocks
    bytes 4-7     length of the frame
    counts        one per block, in 1, 2 or 4 bytes, as the largest budget needs
    scales        float32, if the value format is scaled: one for every so many entries of a block as the format says,
                  one for the rest of the block, and one for a block without entries
    values        the codes of all entries of all blocks, without gaps: as many bits each as the value format says, the
                  first entry in the lowest bits of the first byte; what is left of the last byte is written
                  as zero and not looked at
    indices       gaps between ascending indices, Rice-coded as one stream of bits (kernels/cpu/gaps.py), or if raw, an
                  int32 per entry; relative to their block

Both sides know which blocks a frame holds and how many entries each may have, so the receiver knows the largest
possible size in advance, and no size is ever sent ahead. A frame from the network is untrusted: everything is checked
before it is used, and what is wrong has a *verdict*, one of the negative numbers below. A poisoned frame holds no
entries: its sender has no finite gradient.

A **vector** (`vector.py`) holds values for coordinates that both sides know: one byte, 1 for fine or 2 for poisoned;
scales, if the value format is scaled, and codes, as in a frame of one block. Its size is known from the number of
values.

**Rows of numbers** (`collectives/numbers.py`) are int32, as many per member as all of them know. **Bare floats** are
the float32 pieces that dense all-reduces exchange, finite or not. Neither has a header: both sides know the size.

All numbers are little-endian. This module imports neither torch nor numpy, so that settings can list the formats and
the command line starts fast.
"""

import functools
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

VERSION = 1
HEADER = struct.Struct("<BBHI")  # version, flags, number of blocks, length

CODE_BITS = 7  # of the flags: the value format's code
RAW_FLAG = 8
POISONED_FLAG = 16

# Verdicts: what is wrong with a frame. One that is fine has 0 or more entries.
TOO_MANY = -1  # a block has more entries than it may
TOO_SHORT = -2  # its values do not fit into it
NOT_FINITE = -3  # a value or a scale is infinite or NaN, or together they may be
ASTRAY = -4  # indices run out, descend, or leave their block
FOREIGN = -5  # the header is of another frame than the expected one
POISONED = -6  # nothing: its sender has no finite gradient

WIDTHS = (0, 1, 2, 4, 8, 16, 32)

_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")
_WHOLE_BLOCK = 1 << 32  # more entries than a count can say


@dataclass(frozen=True)
class ValueFormat(ABC):
    """How float32 values become codes, and codes become the values that every rank computes with.

    name             what users write
    code             its number in a frame's header, 0 to 7
    bits             of one value in a frame: 32, 16, 8, 4, 2 or 1; 0 if no values travel
    codes            torch's name for the type of a code in memory, where every entry has one of its own; for less than
                     8 bits "int8" (codes are signed) or "uint8"
    per_scale        how many entries of a block share a scale, a float32; 0 if there are no scales
    exact            nothing is rounded, so there is no error that the sender would have to keep
    not_finite       bits that are all set in the codes of infinity and NaN, and in no other; 0 if all are finite
    rounds_in_place  kernels round to this format while they select (`take_rounded`), and convert faster than `encode`
                     and `decode` do (`round_bf16`, `widen_bf16`)
    """

    name: str
    code: int
    bits: int
    codes: str
    per_scale: int = 0
    exact: bool = False
    not_finite: int = 0
    rounds_in_place: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.code <= CODE_BITS:
            raise ValueError(f"value format {self.name!r} cannot have code {self.code}; choose one from 0 to 7.")
        if self.bits not in WIDTHS:
            raise ValueError(f"value format {self.name!r} cannot have {self.bits} bits; choose from {WIDTHS}.")

    @abstractmethod
    def encode(self, values: "Tensor", counts: "NDArray[np.int64]") -> "tuple[Tensor, Tensor]":
        """The codes of `values`, of which block b has the next `counts[b]`, and the scales of the blocks, if scaled.

        What would overflow becomes the largest finite value; infinities and NaN are still seen by whoever decodes. The
        same values give the same codes and scales on every machine: ranks that hold the same entries code them alike.
        """

    @abstractmethod
    def decode(self, codes: "Tensor", scales: "Tensor", counts: "NDArray[np.int64]") -> "Tensor":
        """The float32 values that these codes and scales stand for."""

    @property
    def carries_values(self) -> bool:
        """Whether values travel at all, and not indices alone."""
        return self.bits > 0

    @property
    def scaled(self) -> bool:
        """Whether scales travel."""
        return self.per_scale > 0

    @functools.cached_property
    def dtype(self) -> "torch.dtype":
        """The type of a code in memory."""
        import torch

        found: torch.dtype = getattr(torch, self.codes)
        return found

    @functools.cached_property
    def largest_scale(self) -> float:
        """The largest magnitude of a scale: with it, any code is still a finite value."""
        return _LARGEST_FLOAT32

    def scale_counts(self, counts: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """How many scales each of the blocks with so many entries has, if there are scales."""
        return (-(-counts // self.per_scale)).clip(1)

    def scales_of(self, counts: "NDArray[np.int64]") -> int:
        """How many scales blocks with so many entries have together."""
        return int(self.scale_counts(counts).sum()) if self.scaled else 0

    def size(self, count: int) -> int:
        """Bytes that the codes of `count` values take on the wire."""
        return (count * self.bits + 7) // 8


@dataclass(frozen=True)
class FloatFormat(ValueFormat):
    """Values as shorter floats, each rounded to the nearest, ties to even. Their type must have infinities: one that
    has none would hide an overflow."""

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite value."""
        import torch

        return torch.finfo(self.dtype).max

    def encode(self, values: "Tensor", counts: "NDArray[np.int64]") -> "tuple[Tensor, Tensor]":
        codes = values if self.exact else _saturate(values, self.largest).to(self.dtype)
        return codes, values[:0]

    def decode(self, codes: "Tensor", scales: "Tensor", counts: "NDArray[np.int64]") -> "Tensor":
        return codes.float()


@dataclass(frozen=True)
class ScaledFormat(ValueFormat):
    """Values as whole numbers of steps, from -`levels` to `levels`; a step, the scale of its block, is the block's
    largest magnitude over `levels`."""

    codes: str = "int8"
    per_scale: int = _WHOLE_BLOCK

    @property
    def levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @functools.cached_property
    def largest_scale(self) -> float:
        return _LARGEST_FLOAT32 / (1 << (self.bits - 1))

    def encode(self, values: "Tensor", counts: "NDArray[np.int64]") -> "tuple[Tensor, Tensor]":
        owner = _owner(counts, values.device)
        largest = values.new_zeros(len(counts)).scatter_reduce_(0, owner, values.abs(), "amax")
        scales = _saturate(largest / self.levels, self.largest_scale)
        steps = scales[owner]
        codes = (values / steps).where(steps > 0, 0).round().clamp(-self.levels, self.levels)
        return codes.to(self.dtype), scales

    def decode(self, codes: "Tensor", scales: "Tensor", counts: "NDArray[np.int64]") -> "Tensor":
        return codes.float() * scales[_owner(counts, codes.device)]


@dataclass(frozen=True)
class IndicesOnly(ValueFormat):
    """No values at all: a frame of this format says where entries are. They are decoded as zeros."""

    bits: int = 0
    codes: str = "float32"
    exact: bool = True

    def encode(self, values: "Tensor", counts: "NDArray[np.int64]") -> "tuple[Tensor, Tensor]":
        return values[:0], values[:0]

    def decode(self, codes: "Tensor", scales: "Tensor", counts: "NDArray[np.int64]") -> "Tensor":
        return codes.new_zeros(int(counts.sum()))


VALUE_FORMATS: dict[str, ValueFormat] = {
    form.name: form
    for form in (
        FloatFormat("fp32", 0, bits=32, codes="float32", exact=True, not_finite=0x7F800000),
        FloatFormat("bf16", 1, bits=16, codes="bfloat16", not_finite=0x7F80, rounds_in_place=True),
        FloatFormat("fp16", 2, bits=16, codes="float16", not_finite=0x7C00),
        ScaledFormat("int8", 3, bits=8),
        IndicesOnly("none", 4),
    )
}


def value_format(form: str | ValueFormat) -> ValueFormat:
    """The format of this name; a format stands for itself."""
    return form if isinstance(form, ValueFormat) else VALUE_FORMATS[form]


@dataclass(frozen=True)
class FrameFormat:
    """How the frames of one run are written: all ranks agreed on it at attach."""

    values: ValueFormat
    raw: bool  # indices are written as they are

    @functools.cached_property
    def flags(self) -> int:
        """Byte 1 of a frame that is not poisoned."""
        return self.values.code | (RAW_FLAG if self.raw else 0)


def count_bytes(largest_budget: int) -> int:
    """Bytes that each count of a frame takes."""
    return 1 if largest_budget < 1 << 8 else 2 if largest_budget < 1 << 16 else 4


def _saturate(values: "Tensor", limit: float) -> "Tensor":
    """Values beyond the limit become it; infinities and NaN stay what they are."""
    return values.where(values.isinf(), values.clamp(-limit, limit))


def _owner(counts: "NDArray[np.int64]", device: "torch.device") -> "Tensor":
    """The block of each entry."""
    import numpy as np
    import torch

    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)
