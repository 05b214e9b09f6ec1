"""Frames in plain torch, for any device: the bytes that `wire/format.py` describes, as `cpu/framing.py` writes and
reads them.

Counts and sizes are computed on the host, from the few numbers of a frame's head; codes and indices stay on the
device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import download, upload
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
    """The frame of these entries, as bytes. The host waits once, for the length of its indices."""
    counts, places, codes, scales = entries
    out = torch.empty(frame_room(form, lengths, budgets), dtype=torch.uint8, device=places.device)
    at = _head_size(budgets)
    for part in (as_bytes(scales), pack_codes(codes, form.values.bits), as_bytes(places if form.raw else places[:0])):
        out[at : at + part.numel()] = part
        at += part.numel()
    if not form.raw:
        at += int(download(write_gaps(out[at:], plan_gaps(counts, lengths)[0], counts, places)))
    flags = form.flags | (POISONED_FLAG if poisoned else 0)
    head = HEADER.pack(VERSION, flags, counts.size, at) + counts.astype(_count_type(budgets)).tobytes()
    out[: len(head)] = upload(np.frombuffer(head, np.uint8), out.device)
    return out[:at]


def read_frame(frame: Tensor, form: FrameFormat, lengths: Ints, budgets: Ints) -> tuple[int, CodedEntries[Tensor]]:
    """How many entries a frame has, or a verdict; and its entries. Bytes behind the frame do not count.

    The host waits for the head, and once more for the verdict on all that follows.
    """
    nothing = _nothing(form, frame, budgets.size)
    at = _head_size(budgets)
    head = download(frame[:at])
    length = _judge_header(head, frame.numel(), form.flags, budgets.size)
    if length < at:
        return min(length, TOO_SHORT), nothing
    frame = frame[:length]
    counts = np.frombuffer(head[HEADER.size :], _count_type(budgets)).astype(np.int64)
    if (counts > np.minimum(budgets, lengths)).any():
        return TOO_MANY, nothing
    total = int(counts.sum())
    middle = at + 4 * form.values.scales_of(counts)
    end = middle + form.values.size(total)
    if length < end:
        return TOO_SHORT, nothing
    scales = from_bytes(frame[at:middle], torch.float32)
    codes = unpack_codes(frame[middle:end], total, form.values.bits, form.values.dtype)
    if form.raw:
        places, inside = _read_raw(frame[end:], counts, lengths)
    else:
        places, inside = read_gaps(frame[end:], plan_gaps(counts, lengths)[0], counts, lengths)
    small = (scales.abs() <= form.values.largest_scale).all()
    faults = download(torch.stack((_some_not_finite(codes, form.values), ~inside, ~small)))
    if faults.any():
        return (NOT_FINITE, ASTRAY, NOT_FINITE)[int(faults.argmax())], nothing
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


def _some_not_finite(codes: Tensor, form: ValueFormat) -> Tensor:
    if not form.not_finite or not codes.numel():
        return torch.zeros((), dtype=torch.bool, device=codes.device)
    words = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.itemsize])
    return (words & form.not_finite == form.not_finite).any()


# --- indices ------------------------------------------------------------------------------------------------------


def plan_gaps(counts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """How many low bits each block's gaps keep apart, and the most bits that its indices can then take."""
    widths = np.arange(WIDEST_GAP)[:, None]
    bits = np.where(counts > 0, counts * (widths + 1) + (lengths - counts >> widths), 0)
    best = bits.argmin(0)
    return best, np.take_along_axis(bits, best[None], 0)[0]


def write_gaps(out: Tensor, low_bits: Ints, counts: Ints, indices: Tensor) -> Tensor:
    """Write every block's gaps into `out`, one bit stream, and zeros behind it; its length in bytes, on the device.

    Block b's low bits come first, and then, in unary, what is left of its gaps; so its first bit lies behind all low
    bits and all unary codes of the blocks before it.
    """
    device, ids = indices.device, indices.long()
    lows = counts * low_bits
    first = _spread(counts.cumsum() - counts, counts, device)  # of each entry's block, among entries
    order = torch.arange(ids.numel(), device=device)
    width = _spread(low_bits, counts, device)
    gaps = torch.where(order == first, ids, ids - ids.roll(1) - 1)
    ends = torch.cumsum((gaps >> width) + 1, 0)
    before = torch.nn.functional.pad(ends, (1, 0))
    bits = torch.zeros(8 * out.numel() + 1, dtype=torch.uint8, device=device)  # the last one is for nobody
    bits[_spread(lows.cumsum(), counts, device) + ends - 1] = 1
    at = _spread(lows.cumsum() - lows, counts, device) + before[first] + (order - first) * width
    for bit in range(int(low_bits.max(initial=0))):
        bits[torch.where(width > bit, at + bit, bits.numel() - 1)] = ((gaps >> bit) & 1).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    out[:] = (bits[:-1].view(-1, 8) << shifts).sum(1, dtype=torch.uint8)
    return (before[-1] + (int(lows.sum()) + 7)) // 8


def read_gaps(data: Tensor, low_bits: Ints, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor]:
    """The indices that `write_gaps` wrote, and whether these bytes hold as many and none leaves its block.

    Where a block begins only the device knows, which has read the one before.
    """
    device = data.device
    bits = ((data[:, None] >> torch.arange(8, device=device, dtype=torch.uint8)) & 1).flatten()
    bits = torch.nn.functional.pad(bits, (0, 1))  # there is always one to look at
    ones, last = torch.cumsum(bits, 0), bits.numel() - 1
    cursor = torch.zeros(1, dtype=torch.int64, device=device)  # as an index, a tensor without a dimension is read
    fine = torch.ones(1, dtype=torch.bool, device=device)
    blocks = [torch.empty(0, dtype=torch.int32, device=device)]
    for count, width, length in zip(counts.tolist(), low_bits.tolist(), lengths.tolist(), strict=True):
        if not count:
            continue
        high = cursor + width * count
        behind = ones[(high - 1).clamp(0, last)] * (high > 0)
        ends = torch.searchsorted(ones, behind + torch.arange(1, count + 1, device=device)) - high
        places = (cursor + torch.arange(width * count, device=device)).clamp(max=last)
        lows = (bits[places].view(count, width).long() << torch.arange(width, device=device)).sum(1)
        quotients = torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1
        ids = torch.cumsum((quotients << width) + lows + 1, 0) - 1
        end = ends[-1:] + 1
        cursor = high + end
        fine = fine & (high <= last) & (cursor <= last) & (end - count <= length >> width) & (ids[-1:] < length)
        blocks.append(ids.int())
    return torch.cat(blocks), (fine & ((cursor + 7) // 8 == data.numel())).all()


def _read_raw(data: Tensor, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor]:
    """The indices that stand in these bytes as they are, and whether they ascend within their blocks."""
    count, device = int(counts.sum()), data.device
    if data.numel() != 4 * count:
        return torch.empty(0, dtype=torch.int32, device=device), torch.zeros((), dtype=torch.bool, device=device)
    indices = from_bytes(data, torch.int32)
    begins = torch.arange(count, device=device) == _spread(counts.cumsum() - counts, counts, device)
    inside = (indices >= 0) & (indices < _spread(lengths, counts, device))
    return indices, (inside & (begins | (indices > indices.roll(1)))).all()


def _spread(per_block: Ints, counts: Ints, device: torch.device) -> Tensor:
    """`per_block[b]`, repeated for each of the `counts[b]` entries of block b."""
    return upload(np.repeat(per_block, counts), device)


# --- heads --------------------------------------------------------------------------------------------------------


def _judge_header(head: NDArray[np.uint8], size: int, expected: int, blocks: int) -> int:
    """The length of a frame that is in `size` bytes and begins like this, or a verdict."""
    if size < HEADER.size:
        return FOREIGN
    version, flags, found, length = HEADER.unpack(head[: HEADER.size].data)
    ours = version == VERSION and flags & ~POISONED_FLAG == expected and found == blocks
    if not (ours and HEADER.size <= length <= size):
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
