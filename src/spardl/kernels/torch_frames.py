"""Frames in plain torch, for any device: the bytes that `wire/format.py` describes, as `cpu/framing.py` writes and
reads them.

Counts and sizes are computed on the host, from the few numbers of a frame's head; codes and indices stay on the
device.
"""

import numpy as np
import torch
from torch import Tensor

from spardl.kernels.api import CodedEntries, Ints
from spardl.wire.format import (
    ASTRAY,
    FOREIGN,
    HEADER,
    NOT_FINITE,
    POISONED,
    POISONED_FLAG,
    TOO_MANY,
    TOO_SHORT,
    VERSION,
    FrameFormat,
    ValueFormat,
    count_bytes,
)

WIDEST_GAP = 32  # bits of an index, hence more than the low bits of any gap


def frame_room(form: FrameFormat, lengths: Ints, budgets: Ints) -> int:
    """The most bytes that a frame for blocks of these lengths and budgets can have."""
    entries = int(budgets.sum())
    bits = 32 * entries if form.raw else int(plan_gaps(budgets, lengths)[1].sum())
    scales = 4 * form.values.scales_of(budgets)
    return _head_size(budgets) + scales + form.values.size(entries) + (bits + 7) // 8


def write_frame(
    form: FrameFormat, poisoned: bool, lengths: Ints, budgets: Ints, entries: CodedEntries[Tensor]
) -> Tensor:
    """The frame of these entries, as bytes."""
    counts, places, codes, scales = entries
    out = torch.empty(frame_room(form, lengths, budgets), dtype=torch.uint8, device=places.device)
    at = _head_size(budgets)
    for part in (as_bytes(scales), pack_codes(codes, form.values.bits), as_bytes(places if form.raw else places[:0])):
        out[at : at + part.numel()] = part
        at += part.numel()
    if not form.raw:
        at += write_gaps(out[at:], plan_gaps(counts, lengths)[0], counts, places)
    flags = form.flags | (POISONED_FLAG if poisoned else 0)
    head = HEADER.pack(VERSION, flags, counts.size, at) + counts.astype(_count_type(budgets)).tobytes()
    out[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return out[:at]


def read_frame(frame: Tensor, form: FrameFormat, lengths: Ints, budgets: Ints) -> tuple[int, CodedEntries[Tensor]]:
    """How many entries a frame has, or a verdict; and its entries. Bytes behind the frame do not count."""
    nothing = _nothing(form, frame, budgets.size)
    at = _head_size(budgets)
    length = _judge_header(frame, form.flags, budgets.size)
    if length < at:
        return min(length, TOO_SHORT), nothing
    frame = frame[:length]
    counts = np.frombuffer(frame[HEADER.size : at].cpu().numpy(), _count_type(budgets)).astype(np.int64)
    if (counts > np.minimum(budgets, lengths)).any():
        return TOO_MANY, nothing
    total = int(counts.sum())
    middle = at + 4 * form.values.scales_of(counts)
    end = middle + form.values.size(total)
    if length < end:
        return TOO_SHORT, nothing
    scales = from_bytes(frame[at:middle], torch.float32)
    codes = unpack_codes(frame[middle:end], total, form.values.bits, form.values.dtype)
    if _some_not_finite(codes, form.values):
        return NOT_FINITE, nothing
    if form.raw:
        places = _read_raw(frame[end:], counts, lengths)
    else:
        places = read_gaps(frame[end:], plan_gaps(counts, lengths)[0], counts, lengths)
    if places is None:
        return ASTRAY, nothing
    if not bool((scales.abs() <= form.values.largest_scale).all()):
        return NOT_FINITE, nothing
    return total, CodedEntries(counts, places, codes, scales)


# --- codes --------------------------------------------------------------------------------------------------------


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes, one per entry, as the bytes that they take on the wire: `bits` each, the first one lowest."""
    if bits >= 8 or not codes.numel():
        return as_bytes(codes)
    each = 8 // bits
    fields = torch.nn.functional.pad(as_bytes(codes) & ((1 << bits) - 1), (0, -codes.numel() % each)).view(-1, each)
    return (fields << _shifts(bits, codes.device)).sum(1, dtype=torch.uint8)


def unpack_codes(data: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The `count` codes that `pack_codes` made these bytes of."""
    if bits >= 8 or not data.numel():
        return from_bytes(data, dtype)
    mask, sign = (1 << bits) - 1, (1 << (bits - 1)) if dtype.is_signed else 0
    fields = ((data[:, None] >> _shifts(bits, data.device)) & mask).flatten()[:count]
    return ((fields ^ sign) - sign).view(dtype)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _some_not_finite(codes: Tensor, form: ValueFormat) -> bool:
    if not form.not_finite or not codes.numel():
        return False
    words = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.itemsize])
    return bool((words & form.not_finite == form.not_finite).any())


# --- indices ------------------------------------------------------------------------------------------------------


def plan_gaps(counts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """How many low bits each block's gaps keep apart, and the most bits that its indices can then take."""
    widths = np.arange(WIDEST_GAP)[:, None]
    bits = np.where(counts > 0, counts * (widths + 1) + (lengths - counts >> widths), 0)
    best = bits.argmin(0)
    return best, np.take_along_axis(bits, best[None], 0)[0]


def write_gaps(out: Tensor, low_bits: Ints, counts: Ints, indices: Tensor) -> int:
    """Write every block's gaps into `out`, one bit stream; return its length in bytes."""
    device = indices.device
    streams = []
    for ids, width in zip(torch.split(indices, counts.tolist()), low_bits.tolist(), strict=True):
        ids = ids.long()
        gaps = torch.diff(ids, prepend=ids.new_full((1,), -1)) - 1
        lows = (gaps[:, None] >> torch.arange(width, device=device)) & 1
        ends = torch.cumsum((gaps >> width) + 1, 0)  # one past each unary code
        unary = torch.zeros(int(ends[-1]) if ids.numel() else 0, dtype=torch.int32, device=device)
        unary[(ends - 1).long()] = 1
        streams += [lows.flatten().int(), unary]
    bits = torch.cat(streams) if streams else indices.new_empty(0)
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    written = padded.shape[0]
    out[:written] = (padded << torch.arange(8, device=device)).sum(1)
    return written


def read_gaps(data: Tensor, low_bits: Ints, counts: Ints, lengths: Ints) -> Tensor | None:
    """The indices that `write_gaps` wrote, or None if these bytes do not hold as many, or any leaves its block."""
    device = data.device
    bits = ((data[:, None] >> torch.arange(8, device=device, dtype=torch.uint8)) & 1).flatten()
    cursor = 0
    blocks = [torch.empty(0, dtype=torch.int32, device=device)]
    for count, width, length in zip(counts.tolist(), low_bits.tolist(), lengths.tolist(), strict=True):
        high = cursor + width * count
        ends = bits[high:].nonzero().flatten()[:count]
        if ends.numel() < count or (count and int(ends[-1]) + 1 - count > length >> width):
            return None
        lows = (bits[cursor:high].view(count, width).long() << torch.arange(width, device=device)).sum(1)
        quotients = torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1
        ids = torch.cumsum((quotients << width) + lows + 1, 0) - 1
        if count and int(ids[-1]) >= length:
            return None
        blocks.append(ids.int())
        cursor = high + (int(ends[-1]) + 1 if count else 0)
    return torch.cat(blocks) if (cursor + 7) // 8 == data.numel() else None


def _read_raw(data: Tensor, counts: Ints, lengths: Ints) -> Tensor | None:
    """The indices that stand in these bytes as they are, or None if they do not ascend within their blocks."""
    if data.numel() != 4 * int(counts.sum()):
        return None
    indices = from_bytes(data, torch.int32)
    for block, length in zip(indices.split(counts.tolist()), lengths.tolist(), strict=True):
        if block.numel() and not (int(block[0]) >= 0 and int(block[-1]) < length and (block[1:] > block[:-1]).all()):
            return None
    return indices


# --- heads --------------------------------------------------------------------------------------------------------


def _judge_header(frame: Tensor, expected: int, blocks: int) -> int:
    """The frame's length, or a verdict."""
    if frame.numel() < HEADER.size:
        return FOREIGN
    version, flags, found, length = HEADER.unpack(frame[: HEADER.size].cpu().numpy().data)
    ours = version == VERSION and flags & ~POISONED_FLAG == expected and found == blocks
    if not (ours and HEADER.size <= length <= frame.numel()):
        return FOREIGN
    return POISONED if flags & POISONED_FLAG else int(length)


def _head_size(budgets: Ints) -> int:
    """Bytes of a frame's header and counts."""
    return HEADER.size + budgets.size * _count_type(budgets).itemsize


def _count_type(budgets: Ints) -> "np.dtype[np.unsignedinteger]":
    return np.dtype(f"<u{count_bytes(int(budgets.max(initial=0)))}")


def _nothing(form: FrameFormat, frame: Tensor, blocks: int) -> CodedEntries[Tensor]:
    """What a frame that is refused holds."""
    places, codes, scales = (from_bytes(frame[:0], kind) for kind in (torch.int32, form.values.dtype, torch.float32))
    return CodedEntries(np.zeros(blocks, np.int64), places, codes, scales)


def as_bytes(values: Tensor) -> Tensor:
    """The memory of contiguous values."""
    return values.view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of these bytes, which need not be aligned, as values."""
    values = torch.empty(data.numel() // dtype.itemsize, dtype=dtype, device=data.device)
    values.view(torch.uint8)[:] = data
    return values
