"""One message: all blocks that one rank sends to one other in one round. `format.py` describes its bytes.

A frame from the network is untrusted: everything is checked before it is used.
"""

from dataclasses import dataclass

import numpy as np
import torch

from spardl import host, sparse
from spardl.errors import ProtocolError
from spardl.kernels.api import Array, CodedEntries, Ints, Kernels
from spardl.sparse import SparseBlocks
from spardl.wire import format as wire
from spardl.wire.format import FrameFormat, ValueFormat, value_format

_FAULTS = {
    wire.TOO_MANY: "more entries than a block may have",
    wire.TOO_SHORT: "too few bytes for its values and indices",
    wire.NOT_FINITE: "a value that is not finite",
    wire.ASTRAY: "indices that run out, are out of order or outside their block",
    wire.OTHER_COUNTS: "other numbers of entries than its blocks must have",
    wire.FOREIGN: "something else than a frame of these blocks",
}


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """Sparse blocks in the wire's value format. Packing and unpacking loses nothing, however often it is forwarded.

    ids      of the blocks
    format   of the codes
    kernels  of the device that holds the entries
    """

    ids: Ints
    entries: CodedEntries[Array]
    format: ValueFormat
    kernels: Kernels

    @property
    def counts(self) -> Ints:
        """How many entries each block has."""
        return self.entries.counts

    @property
    def places(self) -> Array:
        """Indices, relative to their block."""
        return self.entries.places

    @property
    def codes(self) -> Array:
        return self.entries.codes

    @property
    def scales(self) -> Array:
        return self.entries.scales

    def decode(self) -> SparseBlocks:
        """The float32 values that every rank computes with."""
        return SparseBlocks(self.ids, self.counts, self.places, self._amounts())

    def _amounts(self) -> Array:
        kernels = self.kernels
        counts, places, codes, scales = self.entries
        if not len(codes):
            return torch.zeros(len(places), device=torch.as_tensor(places).device)
        if self.format.rounds_in_place:
            return kernels.widen_bf16(codes)
        words, steps = kernels.tensor(codes, self.format.dtype), kernels.tensor(scales, torch.float32)
        return kernels.array(kernels.decode(self.format, words, steps, counts))

    def split(self) -> list["CodedBlocks"]:
        """One piece per block."""
        counts, places, codes, scales = self.entries
        stretches = sparse.parts(places, counts)
        coded = sparse.parts(codes, counts) if len(codes) else [codes] * len(stretches)
        scaled = sparse.parts(scales, self.format.scale_counts(counts)) if len(scales) else [scales] * len(stretches)
        return [
            CodedBlocks(
                self.ids[i : i + 1],
                CodedEntries(counts[i : i + 1], stretches[i], coded[i], scaled[i]),
                self.format,
                self.kernels,
            )
            for i in range(len(stretches))
        ]

    def parted(self, blocks: int) -> tuple["CodedBlocks", "CodedBlocks"]:
        """The first `blocks` blocks, and the others."""
        if blocks == len(self.ids):
            return self, self._stretch(blocks, blocks)
        return self._stretch(0, blocks), self._stretch(blocks, len(self.ids))

    def _stretch(self, first: int, stop: int) -> "CodedBlocks":
        counts, places, codes, scales = self.entries
        begin, end = int(counts[:first].sum()), int(counts[:stop].sum())
        if len(scales):
            scale_counts = self.format.scale_counts(counts)
            scales = scales[int(scale_counts[:first].sum()) : int(scale_counts[:stop].sum())]
        entries = CodedEntries(counts[first:stop], places[begin:end], codes[begin:end], scales)
        return CodedBlocks(self.ids[first:stop], entries, self.format, self.kernels)

    @staticmethod
    def join(pieces: list["CodedBlocks"]) -> "CodedBlocks":
        """The blocks of all pieces, one piece after the other."""
        first = pieces[0]
        if len(pieces) == 1:
            return first
        entries = CodedEntries(
            np.concatenate([piece.counts for piece in pieces]),
            sparse.join([piece.places for piece in pieces]),
            sparse.join([piece.codes for piece in pieces]),
            sparse.join([piece.scales for piece in pieces]) if len(first.scales) else first.scales,
        )
        return CodedBlocks(np.concatenate([piece.ids for piece in pieces]), entries, first.format, first.kernels)


class Codec:
    """The wire format that all ranks agreed on at attach, for entries on one device.

    values   a value format, or the name of one; `format` is what others ask about it
    indices  "rice", "fixed" or "raw"; "auto" is fixed where frames are as long as they may be, so that nothing is lost
             by it, and rice elsewhere
    kernels  of the device
    """

    def __init__(self, values: str | ValueFormat, indices: str, kernels: Kernels) -> None:
        self.format = value_format(values)
        self.indices = ("fixed" if kernels.fills else "rice") if indices == "auto" else indices
        self.kernels = kernels
        self._frame = FrameFormat(self.format, self.indices)
        self._no_scales: Array | None = None

    @property
    def values(self) -> str:
        """The name of the value format."""
        return self.format.name

    def code(self, entries: SparseBlocks) -> CodedBlocks:
        """Round the values to the wire's format."""
        if not self.format.carries_values:
            return self._coded(entries, entries.amounts[:0], entries.amounts[:0])
        codes, scales = self.kernels.encode(self.format, entries.values, entries.counts)
        return self._coded(entries, codes, scales)

    def round_off(self, entries: SparseBlocks) -> tuple[CodedBlocks, Array]:
        """Round finite values to the wire's format, and say what rounding cost each of them."""
        if self.format.rounds_in_place:
            codes, errors = self.kernels.round_bf16(entries.amounts)
            return self._coded(entries, codes, entries.amounts[:0]), errors
        coded = self.code(entries)
        return coded, entries.values - coded.decode().values

    def coded(self, ids: Ints, counts: Ints, places: Array, codes: Array) -> CodedBlocks:
        """Entries that have been taken in the wire's format already, which is not scaled (`take_rounded`)."""
        if self._no_scales is None:
            self._no_scales = self.kernels.array(self.kernels.tensor(places[:0], torch.float32))
        return CodedBlocks(ids, CodedEntries(counts, places, codes, self._no_scales), self.format, self.kernels)

    def _coded(self, entries: SparseBlocks, codes: Array, scales: Array) -> CodedBlocks:
        array = self.kernels.array
        coded = CodedEntries(entries.counts, array(entries.places), array(codes), array(scales))
        return CodedBlocks(entries.ids, coded, self.format, self.kernels)

    def capacity(self, lengths: Ints, budgets: Ints) -> int:
        """The most bytes that a frame for blocks of these lengths and budgets can have."""
        return self.kernels.frame_room(self._frame, lengths, budgets)

    def pack(self, coded: CodedBlocks, lengths: Ints, budgets: Ints, *, poisoned: host.Flag = False) -> Array:
        """The frame: at most `capacity` bytes."""
        return self.kernels.write_frame(self._frame, poisoned, lengths, budgets, coded.entries)

    def unpack(self, frame: Array, ids: Ints, lengths: Ints, budgets: Ints, peer: int) -> CodedBlocks | None:
        """What `pack` was given, or None for a poisoned frame; `ProtocolError` if this is not a frame for these blocks.

        `frame` may be longer than what was packed: a buffer of the full capacity is fine.
        """
        found, entries = self.kernels.read_frame(frame, self._frame, lengths, budgets)
        if found >= 0:
            return CodedBlocks(ids, entries, self.format, self.kernels)
        if found == wire.POISONED:
            return None
        raise _bad(peer, self._why_foreign(frame, len(ids))) if found == wire.FOREIGN else fault(int(found), peer)

    def open(self, frame: Array, ids: Ints, lengths: Ints, budgets: Ints) -> tuple[torch.Tensor, CodedBlocks]:
        """What `pack` was given, of blocks that are full, by kernels that fill; and a verdict, which is on the device.

        It is 0 if all is well. Otherwise the entries are zeros, and the verdict is `wire.format.POISONED` or a `fault`.
        """
        verdict, entries = self.kernels.read_frame(frame, self._frame, lengths, budgets, full=True)
        assert isinstance(verdict, torch.Tensor), "kernels that fill leave verdicts on the device"
        return verdict, CodedBlocks(ids, entries, self.format, self.kernels)

    def _why_foreign(self, frame: Array, expected: int) -> str:
        if len(frame) < wire.HEADER.size:
            return f"{len(frame)} bytes, fewer than a header takes"
        version, flags, blocks, length = wire.HEADER.unpack(
            np.asarray(host.download(torch.as_tensor(frame[: wire.HEADER.size]))).tobytes()
        )
        if version != wire.VERSION:
            return f"wire version {version} where this is {wire.VERSION}; run the same spardl on all ranks"
        if flags & ~wire.POISONED_FLAG != self._frame.flags:
            return "another value or index format"
        if blocks != expected:
            return f"{blocks} blocks instead of {expected}"
        return f"a frame of {length} bytes in {len(frame)}"


def fault(verdict: int, peer: int) -> ProtocolError:
    """What is wrong with a frame of this verdict."""
    return _bad(peer, _FAULTS[verdict])


def _bad(peer: int, what: str) -> ProtocolError:
    return ProtocolError(f"rank {peer} sent {what}; nothing of it was applied.", peer=peer)
