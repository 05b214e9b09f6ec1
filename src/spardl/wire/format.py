"""What travels between ranks, byte by byte. This page is the only description of it; everything else asks it.

A **frame** holds sparse blocks: all that one rank sends to one other in one round, in one buffer (`frame.py` checks
and uses it, the kernels of each device write and read it).

    byte 0        VERSION
    byte 1        flags: bits 0-2 the value format's code, bit 3 raw indices, bit 4 poisoned, bit 5 fixed indices
    bytes 2-3     number of blocks
    bytes 4-7     length of the frame
    counts        one per block, in 1, 2 or 4 bytes, as the largest budget needs
    scales        float32, if the value format is scaled: one for every so many entries of a block as the format says,
                  one for the rest of the block, and one for a block without entries
    values        the codes of all entries of all blocks, without gaps: as many bits each as the value format says, the
                  first entry in the lowest bits of the first byte; what is left of the last byte is written
                  as zero and not looked at
    indices       relative to their block: gaps between ascending indices, Rice-coded as one stream of bits
                  (kernels/cpu/gaps.py); if fixed, in a stream whose length counts say (kernels/cpu/fixed.py); or if
                  raw, an int32 per entry

Both sides know which blocks a frame holds and how many entries each may have, so the receiver knows the largest
possible size in advance, and no size is ever sent ahead. A frame from the network is untrusted: everything is checked
before it is used, and what is wrong has a *verdict*, one of the negative numbers below. A poisoned frame holds no
entries: its sender has no finite gradient.

A **vector** (`vector.py`) holds values for coordinates that both sides know: one byte, 1 for fine or 2 for poisoned;
scales, if the value format is scaled, and codes, as in a frame of one block. Its size is known from the number of
values.

A **scale** is what codes are multiplied by (`ScaledFormat`), or it says which magnitudes they stand for, the *levels*
(`LevelFormat`): the largest is the bf16 in its upper 16 bits, the smallest the number in its lower 16 bits, in 65536ths
of the largest. Level j = 1, 2, ... L lies (j*j - 1) / (L*L - 1) of the way from the smallest to the largest. Its code
is j - 1, and one more bit, the highest, is set for negative values.

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
POISONED_FLAG = 16
INDEX_FLAGS = {"rice": 0, "fixed": 32, "raw": 8}  # by how indices are written

# Verdicts: what is wrong with a frame. One that is fine has 0 or more entries.
TOO_MANY = -1  # a block has more entries than it may
TOO_SHORT = -2  # its values do not fit into it
NOT_FINITE = -3  # a value or a scale is infinite or NaN, or together they may be
ASTRAY = -4  # indices run out, descend, or leave their block
FOREIGN = -5  # the header is of another frame than the expected one
POISONED = -6  # nothing: its sender has no finite gradient
OTHER_COUNTS = -7  # its blocks do not have as many entries as they must

WIDTHS = (0, 1, 2, 4, 8, 16, 32)

_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")
_LARGEST_BF16 = float.fromhex("0x1.fep+127")
_SMALLEST_NORMAL = 2.0**-126
_WHOLE_BLOCK = 1 << 32  # more entries than a count can say
UNITS = 180  # in which a LevelFormat measures magnitudes; times 8 * 8 for the levels and 1400 entries, below 2**24


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
        owner = owners(counts, values.device)
        scales = self.scales_for(values.new_zeros(len(counts)).scatter_reduce_(0, owner, values.abs(), "amax"))
        steps = scales[owner]
        codes = (values / steps).where(steps > 0, 0).round().clamp(-self.levels, self.levels)
        return codes.to(self.dtype), scales

    def scales_for(self, largest: "Tensor") -> "Tensor":
        """The scales of blocks with these largest magnitudes."""
        from spardl.host import quotient

        return _saturate(quotient(largest, self.levels), self.largest_scale)

    def decode(self, codes: "Tensor", scales: "Tensor", counts: "NDArray[np.int64]") -> "Tensor":
        return codes.float() * scales[owners(counts, codes.device)]


@dataclass(frozen=True)
class LevelFormat(ValueFormat):
    """Values as a sign and one of a few magnitudes, the levels, which follow the data: every `per_scale` entries have
    a smallest and a largest one of their own.

    Entries are the largest of their block: most lie a little above its threshold, a few far above. A grid around zero
    would spend most of its codes where no value is. From the smallest level to the largest, gaps grow like those of
    squares, which costs exponential and heavier tails about 10 % more than the best levels that there are (Lloyd's).

    First, entries are dealt to levels whose ends lie `guess` of the way from the smallest magnitude to the largest;
    then the ends are fitted to them by least squares (of two levels, or one, that makes means), and they are dealt
    again. Sums are of whole numbers and below 2**24, hence exact, in whatever order a device adds.
    """

    codes: str = "int8"
    per_scale: int = 1400  # 0.023 bits per entry; two scales for 1401 entries weigh no more than one for 1000
    guess: tuple[float, float] = (0.0, 0.0)

    @property
    def levels(self) -> int:
        return 1 << (self.bits - 1)

    def encode(self, values: "Tensor", counts: "NDArray[np.int64]") -> "tuple[Tensor, Tensor]":
        import numpy as np
        import torch

        from spardl.host import quotient, upload

        rows = _Rows(counts, self.per_scale)
        magnitudes = rows.fill(values).abs_()
        low, high = magnitudes.amin(1, keepdim=True), magnitudes.amax(1, keepdim=True)
        unit = quotient(high - low, UNITS).maximum(high * 2.0**-20).clamp(min=_SMALLEST_NORMAL)
        amounts = magnitudes.sub_(low).div_(unit).round_()
        guess = upload(np.array([self.guess], np.float32), amounts.device)
        roots = self._nearest(amounts, guess * UNITS)
        ends = low + unit * self._fit(roots.square_(), amounts, rows)
        scales = _join_ends(ends.minimum(high).float())
        roots = self._nearest(amounts, (_split_ends(scales) - low) / unit)
        codes = rows.read(roots.sub_(1).to(self.dtype)) & (self.levels - 1)
        signs = (values.view(torch.int32) >> 31).to(self.dtype) & -self.levels
        return codes | signs, scales

    def decode(self, codes: "Tensor", scales: "Tensor", counts: "NDArray[np.int64]") -> "Tensor":
        import torch

        from spardl.host import quotient

        rows = _Rows(counts, self.per_scale)
        smallest, largest = _split_ends(scales).split(1, dim=1)
        squares = torch.arange(1, self.levels + 1, device=codes.device).square()
        levels = smallest + (largest - smallest) * quotient(squares - 1, max(1, self.levels**2 - 1))
        return rows.read(torch.cat((-levels, levels), 1).gather(1, rows.fill(codes + self.levels).long()))

    def _nearest(self, amounts: "Tensor", ends: "Tensor") -> "Tensor":
        """The numbers, from 1, of the levels nearest to the amounts of each row, between its ends."""
        smallest, largest = ends.split(1, dim=1)
        slope: Tensor = ((self.levels**2 - 1) / (largest - smallest)).where(largest > smallest, 0)
        # Halfway between two squares, less a quarter, is the square of what lies halfway between their roots.
        squares = (amounts * slope).add_(0.75 - smallest * slope)
        return squares.clamp_(0.75, self.levels**2 - 0.25).sqrt_().round_()

    def _fit(self, squares: "Tensor", amounts: "Tensor", rows: "_Rows") -> "Tensor":
        """The ends of each row for which the levels of these squares are nearest to the amounts, by least squares."""
        import torch

        from spardl.host import upload

        count = upload(rows.sizes, amounts.device).to(amounts)
        spare = rows.width - count
        entries = (squares, amounts, squares * squares, squares * amounts)
        x, y, xx, xy = torch.stack([each.sum(1) - spare * each[:, -1] for each in entries]).double()
        spread = count * xx - x * x
        slope = ((count * xy - x * y) / spread).where(spread > 0, 0)
        base = (y - slope * x) / count.clamp(min=1)
        return torch.stack((base + slope, base + slope * self.levels**2), 1)


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
        LevelFormat("int4", 5, bits=4, guess=(0.02, 0.8)),
        LevelFormat("int2", 6, bits=2, guess=(0.0, 0.38)),
        LevelFormat("int1", 7, bits=1),
    )
}


def value_format(form: str | ValueFormat) -> ValueFormat:
    """The format of this name; a format stands for itself."""
    return form if isinstance(form, ValueFormat) else VALUE_FORMATS[form]


@dataclass(frozen=True)
class FrameFormat:
    """How the frames of one run are written: all ranks agreed on it at attach."""

    values: ValueFormat
    indices: str = "rice"

    @functools.cached_property
    def flags(self) -> int:
        """Byte 1 of a frame that is not poisoned."""
        return self.values.code | INDEX_FLAGS[self.indices]


def count_bytes(largest_budget: int) -> int:
    """Bytes that each count of a frame takes."""
    return 1 if largest_budget < 1 << 8 else 2 if largest_budget < 1 << 16 else 4


def _saturate(values: "Tensor", limit: float) -> "Tensor":
    """Values beyond the limit become it; infinities and NaN stay what they are."""
    return values.where(values.isinf(), values.clamp(-limit, limit))


def _join_ends(ends: "Tensor") -> "Tensor":
    """The scales that say these smallest and largest levels, up to rounding."""
    import torch

    smallest, largest = ends.unbind(1)
    largest = _saturate(largest, _LARGEST_BF16).bfloat16().float()
    share = (smallest / largest).nan_to_num().mul(65536).round().clamp(0, 65535).int()
    return (largest.view(torch.int32) | share).view(torch.float32)


def _split_ends(scales: "Tensor") -> "Tensor":
    """The smallest and the largest level that each scale says. Where it is finite, they are."""
    import torch

    words = scales.view(torch.int32)
    largest = (words & -65536).view(torch.float32)
    return torch.stack((largest * ((words & 65535) / 65536), largest), 1)


class _Rows:
    """Blocks of so many entries in rows of one width, each block from a row of its own on, so that those who share a
    scale stand in a row. An empty block has a row too."""

    def __init__(self, counts: "NDArray[np.int64]", longest: int) -> None:
        self.width = int(counts.clip(1, longest).max(initial=1))
        self._counts = counts
        self._rows = (-(-counts // self.width)).clip(1)

    @property
    def sizes(self) -> "NDArray[np.int64]":
        """How many entries each row has."""
        import numpy as np

        sizes = np.full(self._rows.sum(), self.width)
        sizes[self._rows.cumsum() - 1] -= self._rows * self.width - self._counts
        return sizes

    def fill(self, values: "Tensor") -> "Tensor":
        """The rows; what is left of a row repeats the last value of its block."""
        import torch

        pieces = [values[:0]]
        for block, rows in zip(values.split(self._counts.tolist()), self._rows.tolist(), strict=True):
            last = block[-1:] if block.numel() else block.new_zeros(1)
            pieces += [block, last.expand(rows * self.width - block.numel())]
        return torch.cat(pieces).view(-1, self.width)

    def read(self, rows: "Tensor") -> "Tensor":
        """The entries of these rows, without what is left of any."""
        import torch

        blocks = zip(rows.split(self._rows.tolist()), self._counts.tolist(), strict=True)
        return torch.cat([rows.flatten()[:0], *(block.flatten()[:count] for block, count in blocks)])


def owners(counts: "NDArray[np.int64]", device: "torch.device") -> "Tensor":
    """The block of each entry."""
    import numpy as np

    from spardl.host import spread

    return spread(np.arange(len(counts)), counts, device)
