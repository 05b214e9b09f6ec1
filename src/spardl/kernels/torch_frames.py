"""Frames in plain torch, for any device: the bytes that `wire/format.py` describes, as `cpu/framing.py` writes and
reads them.

Counts are known to the host, or read from a frame's head (`read_frame`); codes, indices and lengths stay on the device.
Where both sides know the counts, nothing at all has to be read (`open_frame`).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import Flag, download, marked, spread, upload
from spardl.kernels.api import CodedEntries, Ints
from spardl.wire.format import (
    ASTRAY,
    FOREIGN,
    HEADER,
    NOT_FINITE,
    OTHER_COUNTS,
    POISONED,
    POISONED_FLAG,
    TOO_MANY,
    TOO_SHORT,
    VERSION,
    FrameFormat,
    ValueFormat,
    count_bytes,
)

LENGTH = slice(4, 8)  # where a frame says how long it is

WIDEST_GAP = 32  # bits of an index, hence more than the low bits of any gap


def frame_room(form: FrameFormat, lengths: Ints, budgets: Ints) -> int:
    """The most bytes that a frame for blocks of these lengths and budgets can have."""
    entries = int(budgets.sum())
    bits = 32 * entries if form.indices == "raw" else int(plan_gaps(budgets, lengths)[1].sum())
    scales = 4 * form.values.scales_of(budgets)
    return _head_size(budgets) + scales + form.values.size(entries) + (bits + 7) // 8


def write_frame(
    form: FrameFormat,
    poisoned: Flag,
    lengths: Ints,
    budgets: Ints,
    entries: CodedEntries[Tensor],
    passes: "Passes",
) -> tuple[Tensor, Tensor | int]:
    """The frame of these entries, with zeros behind it up to `frame_room`; and its length, which Rice codes leave on
    the device."""
    counts, places, codes, scales = entries
    device = places.device
    out = torch.zeros(frame_room(form, lengths, budgets), dtype=torch.uint8, device=device)
    at = _head_size(budgets)
    for part in (as_bytes(scales), passes.pack_codes(codes, form.values.bits)):
        out[at : at + part.numel()] = part
        at += part.numel()
    length = at + _write_indices(out[at:], form.indices, counts, lengths, places, passes)
    known = 0 if isinstance(length, Tensor) else length
    passes.write_head(out, _head(form, counts, budgets, known), poisoned)
    if isinstance(length, Tensor):
        out[LENGTH] = (length >> _octets(device) & 255).to(torch.uint8)
    return out, length


def _write_indices(
    out: Tensor, how: str, counts: Ints, lengths: Ints, places: Tensor, passes: "Passes"
) -> Tensor | int:
    """Write the indices; their bytes, which Rice codes leave on the device."""
    if how == "rice":
        return write_gaps(out, plan_gaps(counts, lengths)[0], counts, places)
    data = as_bytes(places) if how == "raw" else passes.write_fixed(counts, lengths, places)
    out[: data.numel()] = data
    return data.numel()


def _read_indices(
    data: Tensor, how: str, counts: Ints, lengths: Ints, passes: "Passes"
) -> tuple[Tensor, Tensor, Tensor | int]:
    """The indices that stand in these bytes, whether they ascend within their blocks, and how many of the bytes they
    take, which Rice codes leave on the device."""
    if how == "rice":
        return read_gaps(data, plan_gaps(counts, lengths)[0], counts, lengths)
    whole = fixed_size(counts, lengths) if how == "fixed" else 4 * int(counts.sum())
    if data.numel() < whole:
        return _first_places(counts, data.device), torch.zeros((), dtype=torch.bool, device=data.device), whole
    read = passes.read_fixed if how == "fixed" else _read_raw
    return *read(data[:whole], counts, lengths), whole


def _head(form: FrameFormat, counts: Ints, budgets: Ints, length: int = 0) -> NDArray[np.uint8]:
    """A frame's header and counts, but for whether it is poisoned."""
    head = HEADER.pack(VERSION, form.flags, counts.size, length) + counts.astype(_count_type(budgets)).tobytes()
    return np.frombuffer(head, np.uint8)


def open_frame(
    frame: Tensor, form: FrameFormat, lengths: Ints, counts: Ints, budgets: Ints, passes: "Passes"
) -> tuple[Tensor, CodedEntries[Tensor]]:
    """A verdict on a frame that must have these counts, 0 if it has and all is well, on the device; and its entries.

    The entries of a frame that is refused are zeros, at the beginning of their blocks. Nobody waits.
    """
    at, total = _head_size(budgets), int(counts.sum())
    middle = at + 4 * form.values.scales_of(counts)
    end = middle + form.values.size(total)
    if frame.numel() < end:
        return torch.full((), TOO_SHORT, device=frame.device), _zeros(form, frame, counts)
    head = upload(_head(form, counts, budgets), frame.device)
    scales = from_bytes(frame[at:middle], torch.float32)
    codes = passes.unpack_codes(frame[middle:end], total, form.values.bits, form.values.dtype)
    places, inside, whole = _read_indices(frame[end:], form.indices, counts, lengths, passes)
    return passes.judge(frame, form, head, end, whole, inside, CodedEntries(counts, places, codes, scales))


def read_frame(
    frame: Tensor, form: FrameFormat, lengths: Ints, budgets: Ints, passes: "Passes"
) -> tuple[int, CodedEntries[Tensor]]:
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
    codes = passes.unpack_codes(frame[middle:end], total, form.values.bits, form.values.dtype)
    places, inside, whole = _read_indices(frame[end:], form.indices, counts, lengths, passes)
    inside = inside & (length - end == whole)
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
    first = spread(counts.cumsum() - counts, counts, device)  # of each entry's block, among entries
    order = torch.arange(ids.numel(), device=device)
    width = spread(low_bits, counts, device)
    gaps = torch.where(order == first, ids, ids - ids.roll(1) - 1)
    ends = torch.cumsum((gaps >> width) + 1, 0)
    before = torch.nn.functional.pad(ends, (1, 0))
    bits = torch.zeros(8 * out.numel() + 1, dtype=torch.uint8, device=device)  # the last one is for nobody
    bits[spread(lows.cumsum(), counts, device) + ends - 1] = 1
    at = spread(lows.cumsum() - lows, counts, device) + before[first] + (order - first) * width
    for bit in range(int(low_bits.max(initial=0))):
        bits[torch.where(width > bit, at + bit, bits.numel() - 1)] = ((gaps >> bit) & 1).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    out[:] = (bits[:-1].view(-1, 8) << shifts).sum(1, dtype=torch.uint8)
    return (before[-1] + (int(lows.sum()) + 7)) // 8


def read_gaps(data: Tensor, low_bits: Ints, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor, Tensor]:
    """The indices that `write_gaps` wrote, whether these bytes hold as many and none leaves its block, and how many of
    them they take.

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
    return torch.cat(blocks), fine.all(), ((cursor + 7) // 8).sum()


def _read_raw(data: Tensor, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor]:
    """The indices that stand in these bytes as they are, and whether they ascend within their blocks."""
    indices = from_bytes(data, torch.int32)
    return indices, ascend(indices, counts, lengths)


def ascend(indices: Tensor, counts: Ints, lengths: Ints) -> Tensor:
    """Whether indices ascend within their blocks."""
    device = indices.device
    begins = torch.arange(indices.numel(), device=device) == spread(counts.cumsum() - counts, counts, device)
    inside = (indices >= 0) & (indices < spread(lengths, counts, device))
    return (inside & (begins | (indices > indices.roll(1)))).all()


def fixed_size(counts: Ints, lengths: Ints) -> int:
    """The bytes of indices in the fixed code (cpu/fixed.py)."""
    return int(plan_gaps(counts, lengths)[1].sum() + 7) // 8


class Passes:
    """What frames need done to their entries, on the device. Triton has passes of its own.

    In the fixed code (cpu/fixed.py) every bit has its place before anything is known of other entries.
    """

    def pack_codes(self, codes: Tensor, bits: int) -> Tensor:
        return pack_codes(codes, bits)

    def unpack_codes(self, data: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
        return unpack_codes(data, count, bits, dtype)

    def write_head(self, out: Tensor, head: NDArray[np.uint8], poisoned: Flag) -> None:
        """Begin a frame with this head, and the flag that says so if it is poisoned."""
        out[: head.size] = upload(head, out.device)
        if isinstance(poisoned, Tensor) or poisoned:
            out[1] += poisoned * POISONED_FLAG

    def judge(
        self,
        frame: Tensor,
        form: FrameFormat,
        head: Tensor,
        end: int,
        whole: Tensor | int,
        inside: Tensor,
        entries: CodedEntries[Tensor],
    ) -> tuple[Tensor, CodedEntries[Tensor]]:
        """The verdict on a frame that must begin with this head, but for its length and its poison, and must have
        `whole` bytes from `end` on; and its entries, or zeros. `inside` says whether its indices are fine."""
        length = (frame[LENGTH].long() << _octets(frame.device)).sum()
        small = (entries.scales.abs() <= form.values.largest_scale).all()
        same = frame[: head.numel()] == head
        known = same[0] & (frame[1] & (255 - POISONED_FLAG) == form.flags) & same[2:4].all()
        faults = (  # the last one counts
            (~small, NOT_FINITE),
            (~inside | (length - end != whole), ASTRAY),
            (_some_not_finite(entries.codes, form.values), NOT_FINITE),
            (length < end, TOO_SHORT),
            (~same[HEADER.size :].all(), OTHER_COUNTS),
            (frame[1] & POISONED_FLAG != 0, POISONED),
            (~known | (length < HEADER.size) | (length > frame.numel()), FOREIGN),
        )
        verdict = torch.zeros((), dtype=torch.int64, device=frame.device)
        for found, fault in faults:
            verdict = verdict.masked_fill(found, fault)
        fine, nothing = verdict == 0, _zeros(form, frame, entries.counts)
        kept = (one.where(fine, other) for one, other in zip(entries[1:], nothing[1:], strict=True))
        return verdict, CodedEntries(entries.counts, *kept)

    def write_fixed(self, counts: Ints, lengths: Ints, indices: Tensor) -> Tensor:
        """Indices in the fixed code: every bit's place is known from counts and lengths."""
        device, plan = indices.device, FixedPlan(counts, lengths, indices.device)
        rest = indices.long() - plan.order
        bits = torch.zeros(
            8 * fixed_size(counts, lengths) + 1, dtype=torch.uint8, device=device
        )  # the last is for nobody
        bits[plan.high + (rest >> plan.width) + plan.order] = 1
        for bit in range(plan.widest):
            bits[torch.where(plan.width > bit, plan.low + bit, bits.numel() - 1)] = ((rest >> bit) & 1).to(torch.uint8)
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        return (bits[:-1].view(-1, 8) << shifts).sum(1, dtype=torch.uint8)

    def read_fixed(self, data: Tensor, counts: Ints, lengths: Ints) -> tuple[Tensor, Tensor]:
        """The indices in the fixed code, in as many bytes as they take, and whether they ascend within their blocks."""
        device, plan, total = data.device, FixedPlan(counts, lengths, data.device), int(counts.sum())
        bits = ((data[:, None] >> torch.arange(8, device=device, dtype=torch.uint8)) & 1).flatten()
        stretches = spread(plan.highs - plan.sizes.cumsum() + plan.sizes, plan.sizes, device)
        ones = bits[stretches + torch.arange(stretches.numel(), device=device)]
        found = marked(ones, total, 0)
        where = found - spread(plan.sizes.cumsum() - plan.sizes, counts, device)  # in the stretch of its block
        within = (ones.sum(dtype=torch.int64) == total) & (
            (where >= 0) & (where < spread(plan.sizes, counts, device))
        ).all()
        rest = (where - plan.order).clamp(min=0) << plan.width
        for bit in range(plan.widest):
            here = plan.width > bit
            rest += (bits[torch.where(here, plan.low + bit, 0)].long() << bit).where(here, 0)
        indices = rest + plan.order
        return indices.clamp(max=2**31 - 1).int(), within & ascend(indices, counts, lengths)


class FixedPlan:
    """Where the bits of entries lie in the fixed code: of each entry, on the device; of each block, on the host.

    width  low bits of its block
    order  how many come before it in its block
    low    where its low bits begin
    high   where the stretch of its block begins; `highs` and `sizes` are where each block's does, and its bits
    """

    def __init__(self, counts: Ints, lengths: Ints, device: torch.device) -> None:
        widths, bits = plan_gaps(counts, lengths)
        firsts = bits.cumsum() - bits
        self.widest = int(widths.max(initial=0, where=counts > 0))
        self.highs, self.sizes = firsts + counts * widths, bits - counts * widths
        self.width = spread(widths, counts, device)
        self.order = _first_places(counts, device).long()
        self.low = spread(firsts, counts, device) + self.order * self.width
        self.high = spread(self.highs, counts, device)


def _first_places(counts: Ints, device: torch.device) -> Tensor:
    """The first places of each block, as many as it has entries."""
    first = spread(counts.cumsum() - counts, counts, device)
    return (torch.arange(first.numel(), device=device) - first).int()


def _octets(device: torch.device) -> Tensor:
    """How far each of a number's four bytes is shifted."""
    return torch.arange(0, 32, 8, device=device)


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


def _zeros(form: FrameFormat, frame: Tensor, counts: Ints) -> CodedEntries[Tensor]:
    """As many entries as these counts say, zeros in the first places of their blocks."""
    total, device = int(counts.sum()), frame.device
    codes = torch.zeros(total if form.values.bits else 0, dtype=form.values.dtype, device=device)
    scales = torch.zeros(form.values.scales_of(counts), device=device)
    return CodedEntries(counts, _first_places(counts, device), codes, scales)


def as_bytes(values: Tensor) -> Tensor:
    """The memory of contiguous values."""
    return values.view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of these bytes, which need not be aligned, as values."""
    values = torch.empty(data.numel() // dtype.itemsize, dtype=dtype, device=data.device)
    values.view(torch.uint8)[:] = data
    return values
