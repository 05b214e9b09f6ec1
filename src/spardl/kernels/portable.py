"""The kernels of `compiled.py` in plain torch, for any device: same names, same signatures, same bits.

Only what works on host arrays alone (`plan_gaps`, `frame_room`) has no twin here, and there is no shortlist.
Slower on CPU and heavier on memory, but they keep data on its device. Run here on CPU only.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.kernels import load
from spardl.kernels.frames import (
    ASTRAY,
    FOREIGN,
    HEADER,
    NOT_FINITE,
    POISONED,
    POISONED_FLAG,
    TOO_MANY,
    TOO_SHORT,
    VERSION,
    Form,
)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def _places(starts: Ints, chunk: int, offset: int, length: int, device: torch.device) -> Tensor:
    """Where natural positions [offset, offset + length) lie in block order."""
    count = len(starts) - 1
    positions = torch.arange(offset, offset + length, device=device)
    pieces = positions // chunk
    base = torch.from_numpy(starts[:-1].copy()).to(device)
    return base[pieces % count] + (pieces // count) * chunk + positions % chunk


def _spread(per_block: Ints, counts: Ints, device: torch.device) -> Tensor:
    """`per_block[b]`, repeated for each of the `counts[b]` entries of block b."""
    return torch.from_numpy(np.repeat(per_block, counts)).to(device)


def array(values: Tensor) -> Tensor:
    return values


def tensor(values: Tensor, kind: torch.dtype) -> Tensor:
    return values.view(kind)


def all_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _chosen(wanted: Bools, chunk: int, offset: int, length: int, device: torch.device) -> Tensor:
    """Which of natural positions [offset, offset + length) lie in wanted blocks, counted from `offset`."""
    blocks = torch.arange(offset, offset + length, device=device) // chunk % len(wanted)
    return torch.from_numpy(wanted).to(device)[blocks].nonzero().flatten()


def accumulate(
    acc: Tensor,
    starts: Ints,
    chunk: int,
    offset: int,
    gradient: Tensor,
    scale: float,
    wanted: Bools,
    shortlist: None = None,
) -> bool:
    here = _chosen(wanted, chunk, offset, gradient.numel(), acc.device)
    places = _places(starts, chunk, offset, gradient.numel(), acc.device)[here]
    before = acc[places]
    after = before + gradient[here] * scale
    acc[places] = after
    gradient[here] = before
    return all_finite(after)


def accumulate_momentum(
    acc: Tensor,
    velocity: Tensor,
    updated: Tensor,
    starts: Ints,
    chunk: int,
    offset: int,
    gradient: Tensor,
    weights: Tensor,
    scale: float,
    momentum: float,
    decay: float,
    damping: float,
    nesterov: bool,
    wanted: Bools,
    shortlist: None = None,
) -> bool:
    here = _chosen(wanted, chunk, offset, gradient.numel(), acc.device)
    places = _places(starts, chunk, offset, gradient.numel(), acc.device)[here]
    fresh = gradient[here] * scale + decay * weights[here]
    speed = momentum * velocity[places] + damping * fresh
    before = acc[places]
    after = before + (fresh + momentum * speed if nesterov else speed)
    acc[places] = after
    updated[places] = speed
    gradient[here] = before
    return all_finite(after)


def read(acc: Tensor, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
    out.copy_(acc[_places(starts, chunk, offset, out.numel(), acc.device)])


def write(acc: Tensor, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
    acc[_places(starts, chunk, offset, source.numel(), acc.device)] = source


def to_natural_order(
    starts: Ints, chunk: int, counts: Ints, indices: Tensor, values: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    count = len(starts) - 1
    blocks = _spread(np.arange(count), counts, indices.device)
    slots = indices // chunk
    positions = (slots.long() * count + blocks) * chunk + indices % chunk
    positions, order = torch.sort(positions)
    return positions, values[order] * factor


def take_largest(
    acc: Tensor,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None = None,
    shortlist: None = None,
) -> tuple[Ints, Tensor, Tensor]:
    counts = np.zeros(firsts.size, np.int64)
    indices, values = [], []
    for b, (first, stop, budget) in enumerate(zip(firsts.tolist(), stops.tolist(), budgets.tolist(), strict=True)):
        block = acc[first:stop]
        kept = keep_largest(block, budget).nonzero().flatten()
        counts[b] = kept.numel()
        taken = block[kept]
        indices.append(kept.int())
        values.append(taken)
        block[kept] = 0
    if not indices:
        return counts, acc.new_empty(0, dtype=torch.int32), acc.new_empty(0)
    return counts, torch.cat(indices), torch.cat(values)


def take_rounded(
    acc: Tensor,
    firsts: Ints,
    stops: Ints,
    budgets: Ints,
    ids: Ints | None = None,
    shortlist: None = None,
) -> tuple[Ints, Tensor, Tensor, bool]:
    counts, indices, values = take_largest(acc, firsts, stops, budgets)
    codes, errors = round_bf16(values)
    scatter_add(acc, firsts, counts, indices, errors)
    return counts, indices, codes, all_finite(values)


def take_above(
    acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: None = None
) -> tuple[Tensor, Tensor]:
    block = acc[first:stop]
    kept = ((block.abs() >= abs(threshold)) & (block != 0)).nonzero().flatten()[: max(0, limit)]
    values = block[kept]
    block[kept] = 0
    return kept.int(), values


def count_above(values: Tensor, threshold: float, shortlist: None = None) -> int:
    return int(((values.abs() >= abs(threshold)) & (values != 0)).sum())


def count_bins(values: Tensor, first: int, shift: int, bins: int) -> Ints:
    places = (values.view(torch.int32).bitwise_and(0x7FFFFFFF) >> shift).long() - first
    counts = torch.bincount(places[places >= 0].clamp(max=bins - 1), minlength=bins)
    return np.asarray(counts.cpu().numpy(), np.int64)


def keep_largest(values: Tensor, budget: int) -> Tensor:
    magnitudes = values.abs()
    if budget >= values.numel():
        return magnitudes > 0
    if budget <= 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    last = torch.topk(magnitudes, budget, sorted=True).values[-1]
    if last == 0:
        return magnitudes > 0
    keep = magnitudes > last
    ties = (magnitudes == last).nonzero().flatten()
    keep[ties[: budget - int(keep.sum())]] = True
    return keep


def part_largest(indices: Tensor, values: Tensor, budget: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    keep = keep_largest(values, budget)
    return (indices[keep], values[keep]), (indices[~keep], values[~keep])


def put_only(out: Tensor, positions: Tensor, values: Tensor) -> None:
    out.zero_()
    out[positions] = values


def scatter_add(
    acc: Tensor,
    firsts: Ints,
    counts: Ints,
    indices: Tensor,
    values: Tensor,
    ids: Ints | None = None,
    shortlist: None = None,
) -> None:
    places = _spread(firsts, counts, acc.device) + indices
    acc[places] = acc[places] + values


def fade(memory: Tensor, firsts: Ints, counts: Ints, indices: Tensor, values: Tensor, share: float) -> None:
    places = _spread(firsts, counts, memory.device) + indices
    entries, values = memory[places], values.abs()
    most = share * entries.abs()
    memory[places] = torch.where(most < values, entries * (most / values), entries)


def merge(left: Tensor, left_values: Tensor, right: Tensor, right_values: Tensor) -> tuple[Tensor, Tensor]:
    indices, inverse = torch.unique(torch.cat((left, right)), sorted=True, return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=left_values.dtype, device=left_values.device)
    values[inverse[: left.numel()]] = left_values
    mine = inverse[left.numel() :]
    values[mine] = values[mine] + right_values
    kept = values != 0
    return indices[kept], values[kept]


def round_bf16(values: Tensor) -> tuple[Tensor, Tensor]:
    limit = torch.finfo(torch.bfloat16).max
    codes = values.clamp(-limit, limit).to(torch.bfloat16)
    return codes, values - codes.float()


def widen_bf16(codes: Tensor) -> Tensor:
    return codes.float()


def write_gaps(out: Tensor, low_bits: Ints, counts: Ints, indices: Tensor) -> int:
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


def write_frame(
    form: Form,
    poisoned: bool,
    lengths: Ints,
    budgets: Ints,
    counts: Ints,
    scales: Tensor,
    codes: Tensor,
    indices: Tensor,
) -> Tensor:
    room = load("spardl.kernels.compiled").frame_room(form, lengths, budgets)
    out = torch.empty(room, dtype=torch.uint8, device=indices.device)
    at = HEADER.size + counts.size * _count_type(budgets).itemsize
    for part in (scales, codes, indices[: len(indices) if form.raw else 0]):
        size = part.numel() * part.itemsize
        out[at : at + size] = part.view(torch.uint8) if size else out[:0]
        at += size
    if not form.raw:
        at += write_gaps(out[at:], _widths(counts, lengths), counts, indices)
    flags = form.flags | (POISONED_FLAG if poisoned else 0)
    head = HEADER.pack(VERSION, flags, counts.size, at) + counts.astype(_count_type(budgets)).tobytes()
    out[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return out[:at]


def read_frame(
    frame: Tensor, form: Form, lengths: Ints, budgets: Ints
) -> tuple[int, tuple[Ints, Tensor, Tensor, Tensor]]:
    counts = np.zeros(budgets.size, np.int64)
    indices, codes, scales = (_as(kind, frame[:0]) for kind in (torch.int32, form.kind, torch.float32))
    blank = (counts, indices, codes, scales)
    at = HEADER.size + counts.size * _count_type(budgets).itemsize
    length = _judge_header(frame, form.flags, counts.size)
    if length < at:
        return min(length, TOO_SHORT), blank
    frame = frame[:length]
    counts[:] = np.frombuffer(frame[HEADER.size : at].cpu().numpy(), _count_type(budgets))
    if (counts > np.minimum(budgets, lengths)).any():
        return TOO_MANY, blank
    total = int(counts.sum())
    middle = at + 4 * counts.size * form.scaled
    end = middle + total * form.value_bytes
    if length < end:
        return TOO_SHORT, blank
    scales, codes = _as(torch.float32, frame[at:middle]), _as(form.kind, frame[middle:end])
    if form.exponents:
        upper = codes.view(torch.int16)[codes.itemsize // 2 - 1 :: codes.itemsize // 2]
        if (upper & form.exponents == form.exponents).any():
            return NOT_FINITE, blank
    if form.raw:
        places = _read_raw(frame[end:], counts, lengths)
    else:
        places = read_gaps(frame[end:], _widths(counts, lengths), counts, lengths)
    return (ASTRAY, blank) if places is None else (total, (counts, places, codes, scales))


def _as(kind: torch.dtype, data: Tensor) -> Tensor:
    """A copy of these bytes, which need not be aligned, as values."""
    values = torch.empty(data.numel() // kind.itemsize, dtype=kind, device=data.device)
    values.view(torch.uint8)[:] = data
    return values


def _judge_header(frame: Tensor, expected: int, blocks: int) -> int:
    if frame.numel() < HEADER.size:
        return FOREIGN
    version, flags, found, length = HEADER.unpack(frame[: HEADER.size].cpu().numpy().data)
    ours = version == VERSION and flags & ~POISONED_FLAG == expected and found == blocks
    if not (ours and HEADER.size <= length <= frame.numel()):
        return FOREIGN
    return POISONED if flags & POISONED_FLAG else int(length)


def _widths(counts: Ints, lengths: Ints) -> Ints:
    widths: Ints = load("spardl.kernels.compiled").plan_gaps(counts, lengths)[0]
    return widths


def _read_raw(data: Tensor, counts: Ints, lengths: Ints) -> Tensor | None:
    if data.numel() != 4 * int(counts.sum()):
        return None
    indices = _as(torch.int32, data)
    for block, length in zip(indices.split(counts.tolist()), lengths.tolist(), strict=True):
        if block.numel() and not (int(block[0]) >= 0 and int(block[-1]) < length and (block[1:] > block[:-1]).all()):
            return None
    return indices


def _count_type(budgets: Ints) -> "np.dtype[np.unsignedinteger]":
    largest = int(budgets.max(initial=0))
    return np.dtype("<u1") if largest < 1 << 8 else np.dtype("<u2") if largest < 1 << 16 else np.dtype("<u4")
