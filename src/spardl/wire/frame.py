"""One message: all blocks that one rank sends to one other in one round, self-describing, in one buffer.

    byte 0        version
    byte 1        flags: bits 0-2 value format ("none": indices only), bit 3 raw indices, bit 4 poisoned
    bytes 2-3     number of blocks
    bytes 4-7     length of the frame
    counts        one per block, in 1, 2 or 4 bytes, as the largest budget needs
    scales        float32 per block, for int8 values only
    values        codes of all entries
    indices       Rice-coded gaps (kernels/_gaps.py), or int32

Both sides know which blocks a frame holds and how many entries each may have, so the receiver knows the capacity in
advance and no size is ever sent ahead. A frame from the network is untrusted: everything is checked before it is used.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spardl import kernels
from spardl.config import Indices, Values
from spardl.errors import ProtocolError
from spardl.kernels import frames
from spardl.sparse import Ints, SparseBlocks
from spardl.wire import values as value_codes

_FORMATS = ("fp32", "bf16", "fp16", "int8", "none")
_RAW = 8
_HOST = torch.device("cpu")

_FAULTS = {
    frames.TOO_MANY: "more entries than a block may have",
    frames.TOO_SHORT: "too few bytes for its values and indices",
    frames.NOT_FINITE: "a value that is not finite",
    frames.ASTRAY: "indices that run out, are out of order or outside their block",
}


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """Sparse blocks in the wire's value format. Packing and unpacking loses nothing, however often it is forwarded."""

    ids: Ints
    counts: Ints
    indices: Tensor
    codes: Tensor
    scales: Tensor

    def decode(self) -> SparseBlocks:
        if self.codes.numel():
            values = value_codes.decode(self.codes, self.scales, self.counts)
        else:
            values = torch.zeros(self.indices.numel(), device=self.indices.device)
        return SparseBlocks(self.ids, self.counts, self.indices, values)

    def split(self) -> list["CodedBlocks"]:
        """One piece per block."""
        sizes = self.counts.tolist()
        codes = self.codes.split(sizes) if self.codes.numel() else [self.codes] * len(sizes)
        return [
            CodedBlocks(self.ids[i : i + 1], self.counts[i : i + 1], indices, codes[i], self.scales[i : i + 1])
            for i, indices in enumerate(self.indices.split(sizes))
        ]

    @staticmethod
    def join(pieces: list["CodedBlocks"]) -> "CodedBlocks":
        if len(pieces) == 1:
            return pieces[0]
        return CodedBlocks(
            np.concatenate([piece.ids for piece in pieces]),
            np.concatenate([piece.counts for piece in pieces]),
            torch.cat([piece.indices for piece in pieces]),
            torch.cat([piece.codes for piece in pieces]),
            torch.cat([piece.scales for piece in pieces]) if pieces[0].scales.numel() else pieces[0].scales,
        )


@dataclass(frozen=True, slots=True)
class Codec:
    """The wire format that all ranks agreed on at attach."""

    values: Values | Literal["none"] = "bf16"
    indices: Indices = "rice"

    def code(self, entries: SparseBlocks) -> CodedBlocks:
        """Round the values to the wire's format."""
        if self.values == "none":
            nothing = entries.values[:0]
            return CodedBlocks(entries.ids, entries.counts, entries.indices, nothing, nothing)
        codes, scales = value_codes.encode(entries.values, entries.counts, self.values)
        return CodedBlocks(entries.ids, entries.counts, entries.indices, codes, scales)

    def round_off(self, entries: SparseBlocks) -> tuple[CodedBlocks, Tensor]:
        """The same, for finite values, and what rounding cost each of them."""
        codes, scales, errors = value_codes.round_off(entries.values, entries.counts, self.values)  # type: ignore[arg-type]
        return CodedBlocks(entries.ids, entries.counts, entries.indices, codes, scales), errors

    def capacity(self, lengths: Ints, budgets: Ints) -> int:
        """The most bytes that a frame for blocks of these lengths and budgets can have."""
        # Budgets and lengths are host arrays, whatever device the entries are on.
        return int(kernels.for_device(_HOST).frame_room(self._form, lengths, budgets))

    def pack(self, coded: CodedBlocks, lengths: Ints, budgets: Ints, *, poisoned: bool = False) -> Tensor:
        """The frame, a uint8 tensor of at most `capacity` bytes."""
        blocks = (lengths, budgets, coded.counts, coded.scales, coded.codes, coded.indices)
        frame: Tensor = kernels.for_device(coded.indices.device).write_frame(self._form, poisoned, *blocks)
        return frame

    def unpack(self, frame: Tensor, ids: Ints, lengths: Ints, budgets: Ints, peer: int) -> CodedBlocks | None:
        """What `pack` was given, or None for a poisoned frame; `ProtocolError` if this is not a frame for these blocks.

        `frame` may be longer than what was packed: a buffer of the full capacity is fine.
        """
        found, read = kernels.for_device(frame.device).read_frame(frame, self._form, lengths, budgets)
        if found == frames.POISONED:
            return None
        if found == frames.FOREIGN:
            raise _bad(peer, self._why_foreign(frame, len(ids)))
        coded = CodedBlocks(ids, *read)
        if found >= 0 and not value_codes.scales_are_fine(coded.scales):
            found = frames.NOT_FINITE
        if found < 0:
            raise _bad(peer, _FAULTS[found])
        return coded

    def _why_foreign(self, frame: Tensor, expected: int) -> str:
        if frame.numel() < frames.HEADER.size:
            return f"{frame.numel()} bytes, fewer than a header takes"
        version, flags, blocks, length = frames.HEADER.unpack(frame[: frames.HEADER.size].cpu().numpy().data)
        if version != frames.VERSION:
            return f"wire version {version} where this is {frames.VERSION}; run the same spardl on all ranks"
        if flags & ~frames.POISONED_FLAG != self._form.flags:
            return "another value or index format"
        if blocks != expected:
            return f"{blocks} blocks instead of {expected}"
        return f"a frame of {length} bytes in {frame.numel()}"

    @property
    def _form(self) -> frames.Form:
        return _form(self.values, self.indices)


@functools.cache
def _form(values: Values | Literal["none"], indices: Indices) -> frames.Form:
    kind = torch.float32 if values == "none" else value_codes.CODE_TYPES[values]
    raw = indices == "raw"
    return frames.Form(
        flags=_FORMATS.index(values) | (_RAW if raw else 0),
        kind=kind,
        value_bytes=0 if values == "none" else kind.itemsize,
        exponents=0 if values == "none" else value_codes.EXPONENTS.get(kind, 0),
        scaled=values == "int8",
        raw=raw,
    )


def _bad(peer: int, what: str) -> ProtocolError:
    return ProtocolError(f"rank {peer} sent {what}; nothing of it was applied.", peer=peer)
