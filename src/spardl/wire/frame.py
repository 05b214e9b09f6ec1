"""One message: all blocks that one rank sends to one other in one round, self-describing, in one buffer.

    byte 0        version
    byte 1        flags: bits 0-2 value format ("none": indices only), bit 3 raw indices, bit 4 poisoned
    bytes 2-3     number of blocks
    bytes 4-7     length of the frame
    counts        one per block, in 1, 2 or 4 bytes, as the largest budget needs
    scales        float32 per block, for int8 values only
    values        codes of all entries
    indices       Rice-coded gaps, or int32

Both sides know which blocks a frame holds and how many entries each may have, so the receiver knows the capacity in
advance and no size is ever sent ahead. A frame from the network is untrusted: everything is checked before it is used.
"""

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spardl import kernels
from spardl.config import Indices, Values
from spardl.errors import ProtocolError
from spardl.sparse import Ints, SparseBlocks
from spardl.wire import gaps
from spardl.wire import values as value_codes

VERSION = 1
_HEADER = struct.Struct("<BBHI")
HEADER = _HEADER.size
_FORMS = ("fp32", "bf16", "fp16", "int8", "none")
_RAW = 8
_POISONED = 16


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """Sparse blocks in the wire's value format. Packing and unpacking loses nothing, however often it is forwarded."""

    ids: Ints
    counts: Ints
    indices: Tensor
    codes: Tensor
    scales: Tensor

    def decode(self) -> SparseBlocks:
        values = torch.zeros(self.indices.numel(), device=self.indices.device)
        if self.codes.numel():
            values = value_codes.decode(self.codes, self.scales, self.counts)
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
        return CodedBlocks(
            np.concatenate([piece.ids for piece in pieces]),
            np.concatenate([piece.counts for piece in pieces]),
            torch.cat([piece.indices for piece in pieces]),
            torch.cat([piece.codes for piece in pieces]),
            torch.cat([piece.scales for piece in pieces]),
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
        return self._fixed(budgets) + int(budgets.sum()) * self._value_bytes + self._index_room(budgets, lengths)

    def pack(self, coded: CodedBlocks, lengths: Ints, budgets: Ints, *, poisoned: bool = False) -> Tensor:
        """The frame, a uint8 tensor of at most `capacity` bytes."""
        counts = coded.counts.astype(_count_type(budgets)).tobytes()
        values = [_bytes(coded.scales), _bytes(coded.codes)]
        at = HEADER + len(counts)
        room = at + sum(part.numel() for part in values) + self._index_room(coded.counts, lengths)
        frame = torch.empty(room, dtype=torch.uint8, device=coded.indices.device)
        for part in values:
            frame[at : at + part.numel()] = part
            at += part.numel()
        at += self._write_indices(frame[at:], coded, lengths)
        head = _HEADER.pack(VERSION, self._flags | (_POISONED if poisoned else 0), len(coded.ids), at) + counts
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return frame[:at]

    def _write_indices(self, out: Tensor, coded: CodedBlocks, lengths: Ints) -> int:
        if self.indices == "raw":
            out[:] = _bytes(coded.indices)
            return out.numel()
        widths = gaps.low_bits(coded.counts, lengths)
        return int(kernels.for_device(out.device).write_gaps(out, widths, coded.counts, coded.indices))

    def unpack(self, frame: Tensor, ids: Ints, lengths: Ints, budgets: Ints, peer: int) -> CodedBlocks | None:
        """What `pack` was given, or None for a poisoned frame; `ProtocolError` if this is not a frame for these blocks.

        `frame` may be longer than what was packed: a buffer of the full capacity is fine.
        """
        fixed = self._fixed(budgets)
        if frame.numel() < fixed:
            raise _bad(peer, f"{frame.numel()} bytes, fewer than a header takes")
        head = frame[:fixed].cpu().numpy().tobytes()
        version, flags, blocks, length = _HEADER.unpack_from(head)
        if version != VERSION:
            raise _bad(peer, f"wire version {version} where this is {VERSION}; run the same spardl on all ranks")
        if flags & ~_POISONED != self._flags:
            raise _bad(peer, "another value or index format")
        if blocks != len(ids):
            raise _bad(peer, f"{blocks} blocks instead of {len(ids)}")
        if not fixed <= length <= frame.numel():
            raise _bad(peer, f"a frame of {length} bytes in {frame.numel()}")
        if flags & _POISONED:
            return None
        counts = np.frombuffer(head, _count_type(budgets), len(ids), HEADER).astype(np.int64)
        if (counts > np.minimum(budgets, lengths)).any():
            raise _bad(peer, "more entries than a block may have")
        return self._unpack_entries(frame[:length], ids, counts, lengths, budgets, peer)

    def _unpack_entries(
        self, frame: Tensor, ids: Ints, counts: Ints, lengths: Ints, budgets: Ints, peer: int
    ) -> CodedBlocks:
        total = int(counts.sum())
        values_at = self._fixed(budgets)
        indices_at = values_at + total * self._value_bytes
        if frame.numel() < indices_at:
            raise _bad(peer, f"{frame.numel()} bytes, too few for {total} values")
        scales_at = values_at - 4 * self._scales(len(ids))
        scales = _from_bytes(frame[scales_at:values_at], torch.float32)
        codes = scales[:0]
        if self.values != "none":
            codes = _from_bytes(frame[values_at:indices_at], value_codes.CODE_TYPES[self.values])
        if not value_codes.all_finite(codes, scales):
            raise _bad(peer, "a value that is not finite")
        return CodedBlocks(ids, counts, self._unpack_indices(frame[indices_at:], counts, lengths, peer), codes, scales)

    def _unpack_indices(self, data: Tensor, counts: Ints, lengths: Ints, peer: int) -> Tensor:
        if self.indices == "raw":
            if data.numel() != 4 * int(counts.sum()):
                raise _bad(peer, f"{data.numel()} bytes of indices for {int(counts.sum())} entries")
            indices = _from_bytes(data, torch.int32)
            for block, length in zip(indices.split(counts.tolist()), lengths.tolist(), strict=True):
                if not _ascends_within(block, length):
                    raise _bad(peer, "indices out of order or outside their block")
            return indices
        found: Tensor | None = kernels.for_device(data.device).read_gaps(
            data, gaps.low_bits(counts, lengths), counts, lengths
        )
        if found is None:
            raise _bad(peer, "indices that run out or leave their block")
        return found

    @property
    def _flags(self) -> int:
        return _FORMS.index(self.values) | (_RAW if self.indices == "raw" else 0)

    @property
    def _value_bytes(self) -> int:
        return 0 if self.values == "none" else value_codes.CODE_TYPES[self.values].itemsize

    def _scales(self, blocks: int) -> int:
        return blocks if self.values == "int8" else 0

    def _fixed(self, budgets: Ints) -> int:
        """Bytes before the values."""
        return HEADER + len(budgets) * _count_type(budgets).itemsize + 4 * self._scales(len(budgets))

    def _index_room(self, counts: Ints, lengths: Ints) -> int:
        if self.indices == "raw":
            return 4 * int(counts.sum())
        return (int(gaps.worst_bits(counts, lengths).sum()) + 7) // 8


def _count_type(budgets: Ints) -> "np.dtype[np.unsignedinteger]":
    largest = int(budgets.max(initial=0))
    return np.dtype("<u1") if largest < 1 << 8 else np.dtype("<u2") if largest < 1 << 16 else np.dtype("<u4")


def _bytes(values: Tensor) -> Tensor:
    if not values.numel():  # whose stride may be anything, which `view` does not take
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    return values.contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # the clone aligns it


def _ascends_within(block: Tensor, length: int) -> bool:
    if not block.numel():
        return True
    return int(block[0]) >= 0 and int(block[-1]) < length and bool((block[1:] > block[:-1]).all())


def _bad(peer: int, what: str) -> ProtocolError:
    return ProtocolError(f"rank {peer} sent {what}; nothing of it was applied.", peer=peer)
