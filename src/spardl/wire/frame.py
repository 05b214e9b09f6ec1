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

from spardl import kernels, sparse
from spardl.config import Indices, Values
from spardl.errors import ProtocolError
from spardl.kernels import frames
from spardl.sparse import Array, Ints, SparseBlocks
from spardl.wire import values as value_codes

_FORMATS = ("fp32", "bf16", "fp16", "int8", "none")
_RAW = 8

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
    places: Array
    codes: Array
    scales: Array
    kind: torch.dtype  # of the codes

    def decode(self) -> SparseBlocks:
        return SparseBlocks(self.ids, self.counts, self.places, self._amounts())

    def _amounts(self) -> Array:
        kernel = kernels.for_array(self.places)
        if not len(self.codes):
            return torch.zeros(len(self.places), device=torch.as_tensor(self.places).device)
        if self.kind is torch.bfloat16:
            return kernel.widen_bf16(self.codes)
        codes, scales = kernel.tensor(self.codes, self.kind), kernel.tensor(self.scales, torch.float32)
        return kernel.array(value_codes.decode(codes, scales, self.counts))

    def split(self) -> list["CodedBlocks"]:
        """One piece per block."""
        places = sparse.parts(self.places, self.counts)
        codes = sparse.parts(self.codes, self.counts) if len(self.codes) else [self.codes] * len(places)
        return [
            CodedBlocks(
                self.ids[i : i + 1], self.counts[i : i + 1], places[i], codes[i], self.scales[i : i + 1], self.kind
            )
            for i in range(len(places))
        ]

    @staticmethod
    def join(pieces: list["CodedBlocks"]) -> "CodedBlocks":
        if len(pieces) == 1:
            return pieces[0]
        return CodedBlocks(
            np.concatenate([piece.ids for piece in pieces]),
            np.concatenate([piece.counts for piece in pieces]),
            sparse.join([piece.places for piece in pieces]),
            sparse.join([piece.codes for piece in pieces]),
            sparse.join([piece.scales for piece in pieces]) if len(pieces[0].scales) else pieces[0].scales,
            pieces[0].kind,
        )


@dataclass(frozen=True)
class Codec:
    """The wire format that all ranks agreed on at attach."""

    values: Values | Literal["none"] = "bf16"
    indices: Indices = "rice"

    def code(self, entries: SparseBlocks) -> CodedBlocks:
        """Round the values to the wire's format."""
        if self.values == "none":
            return self._coded(entries, entries.amounts[:0], entries.amounts[:0])
        return self._coded(entries, *value_codes.encode(entries.values, entries.counts, self.values))

    def round_off(self, entries: SparseBlocks) -> tuple[CodedBlocks, Array]:
        """The same, for finite values, and what rounding cost each of them."""
        if self.values == "bf16":
            codes, errors = kernels.for_array(entries.amounts).round_bf16(entries.amounts)
            return self._coded(entries, codes, entries.amounts[:0]), errors
        coded = self.code(entries)
        return coded, entries.values - coded.decode().values

    def _coded(self, entries: SparseBlocks, codes: Array, scales: Array) -> CodedBlocks:
        array = kernels.for_array(entries.places).array
        return CodedBlocks(
            entries.ids, entries.counts, array(entries.places), array(codes), array(scales), self._form.kind
        )

    def capacity(self, lengths: Ints, budgets: Ints) -> int:
        """The most bytes that a frame for blocks of these lengths and budgets can have."""
        return int(kernels.for_array(lengths).frame_room(self._form, lengths, budgets))

    def pack(self, coded: CodedBlocks, lengths: Ints, budgets: Ints, *, poisoned: bool = False) -> Array:
        """The frame: at most `capacity` bytes."""
        blocks = (lengths, budgets, coded.counts, coded.scales, coded.codes, coded.places)
        return kernels.for_array(coded.places).write_frame(self._form, poisoned, *blocks)

    def unpack(self, frame: Array, ids: Ints, lengths: Ints, budgets: Ints, peer: int) -> CodedBlocks | None:
        """What `pack` was given, or None for a poisoned frame; `ProtocolError` if this is not a frame for these blocks.

        `frame` may be longer than what was packed: a buffer of the full capacity is fine.
        """
        found, (counts, places, codes, scales) = kernels.for_array(frame).read_frame(
            frame, self._form, lengths, budgets
        )
        if found == frames.POISONED:
            return None
        if found == frames.FOREIGN:
            raise _bad(peer, self._why_foreign(frame, len(ids)))
        if found >= 0 and len(scales) and not value_codes.scales_are_fine(torch.as_tensor(scales)):
            found = frames.NOT_FINITE
        if found < 0:
            raise _bad(peer, _FAULTS[found])
        return CodedBlocks(ids, counts, places, codes, scales, self._form.kind)

    def _why_foreign(self, frame: Array, expected: int) -> str:
        if len(frame) < frames.HEADER.size:
            return f"{len(frame)} bytes, fewer than a header takes"
        version, flags, blocks, length = frames.HEADER.unpack(bytes(frame[: frames.HEADER.size].tolist()))
        if version != frames.VERSION:
            return f"wire version {version} where this is {frames.VERSION}; run the same spardl on all ranks"
        if flags & ~frames.POISONED_FLAG != self._form.flags:
            return "another value or index format"
        if blocks != expected:
            return f"{blocks} blocks instead of {expected}"
        return f"a frame of {length} bytes in {len(frame)}"

    @functools.cached_property
    def _form(self) -> frames.Form:
        kind = torch.float32 if self.values == "none" else value_codes.CODE_TYPES[self.values]
        raw = self.indices == "raw"
        return frames.Form(
            flags=_FORMATS.index(self.values) | (_RAW if raw else 0),
            kind=kind,
            value_bytes=0 if self.values == "none" else kind.itemsize,
            exponents=0 if self.values == "none" else value_codes.EXPONENTS.get(kind, 0),
            scaled=self.values == "int8",
            raw=raw,
        )


def _bad(peer: int, what: str) -> ProtocolError:
    return ProtocolError(f"rank {peer} sent {what}; nothing of it was applied.", peer=peer)
