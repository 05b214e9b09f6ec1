"""Whole frames, compiled: packed straight into the buffer that is sent, opened straight from the one that arrived.

`wire/format.py` describes them.
"""

import numpy as np

from spardl.kernels.cpu.fixed import read_fixed, write_fixed
from spardl.kernels.cpu.gaps import plan_block, read_gaps, write_gaps
from spardl.kernels.cpu.jit import compiled, inlined
from spardl.kernels.cpu.narrow import pack_narrow, unpack_narrow
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
)

HEADER_SIZE = HEADER.size

RICE, FIXED, RAW = CODINGS = range(3)  # of indices, as loops know them
CODING_OF = dict(zip(("rice", "fixed", "raw"), CODINGS, strict=True))


@inlined
def _count_bytes(budgets):
    """Bytes of a count, as many as the largest budget needs: `count_bytes` of wire/format.py, compiled."""
    largest = 0
    for b in range(budgets.size):
        largest = max(largest, budgets[b])
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4


@inlined
def _count_scales(counts, per_scale):
    """How many scales blocks with so many entries have: the sum of `scale_counts` of wire/format.py, compiled."""
    scales = 0
    if per_scale:
        for b in range(counts.size):
            scales += max(1, (counts[b] + per_scale - 1) // per_scale)
    return scales


@compiled("int64(int64[::1], int64[::1], int64, int64, int64)")
def frame_room(lengths, budgets, value_bits, per_scale, coding):
    """The most bytes that a frame for blocks of these lengths and budgets can have."""
    entries = bits = 0
    for b in range(budgets.size):
        entries += budgets[b]
        bits += 32 * budgets[b] if coding == RAW else plan_block(budgets[b], lengths[b])[1]
    head = HEADER_SIZE + budgets.size * _count_bytes(budgets) + 4 * _count_scales(budgets, per_scale)
    return head + (entries * value_bits + 7) // 8 + (bits + 7) // 8


@inlined
def _write_number(out, at, number, size):
    for byte in range(size):
        out[at + byte] = np.uint8((number >> (8 * byte)) & 255)
    return at + size


@inlined
def _copy(out, to, data, at, size):
    """How many it copied. Loops do it everywhere in here: numba takes seconds to compile what assigns a slice."""
    for i in range(size):
        out[to + i] = data[at + i]
    return size


@inlined
def _plan(counts, lengths):
    widths = np.empty(counts.size, np.int64)
    for b in range(counts.size):
        widths[b] = plan_block(counts[b], lengths[b])[0]
    return widths


@compiled(
    "int64(uint8[::1], int64, int64, int64, int64[::1], int64[::1], int64[::1], uint8[::1], uint8[::1], int32[::1])"
)
def write_frame(out, flags, coding, value_bits, lengths, budgets, counts, scales, codes, indices):
    """Write a frame; return its length. Scales and codes come as the bytes of their memory."""
    at = HEADER_SIZE
    size = _count_bytes(budgets)
    for b in range(counts.size):
        at = _write_number(out, at, counts[b], size)
    at += _copy(out, at, scales, 0, scales.size)
    if 0 < value_bits < 8:
        at += pack_narrow(out, at, codes, value_bits)
    else:
        at += _copy(out, at, codes, 0, codes.size)
    if coding == RAW:
        at += _copy(out, at, indices.view(np.uint8), 0, 4 * indices.size)
    elif coding == FIXED:
        at += write_fixed(out[at:], counts, lengths, indices)
    else:
        at += write_gaps(out[at:], _plan(counts, lengths), counts, indices)
    _write_number(out, 0, VERSION, 1)
    _write_number(out, 1, flags, 1)
    _write_number(out, 2, counts.size, 2)
    _write_number(out, 4, at, 4)
    return at


@inlined
def _read_number(data, at, size):
    number = np.int64(0)
    for byte in range(size):
        number |= np.int64(data[at + byte]) << (8 * byte)
    return number


@inlined
def _judge_header(frame, flags, blocks):
    """The frame's length, or what is wrong."""
    if frame.size < HEADER_SIZE or frame[0] != VERSION or (frame[1] & ~POISONED_FLAG) != flags:
        return FOREIGN
    length = _read_number(frame, 4, 4)
    if _read_number(frame, 2, 2) != blocks or not HEADER_SIZE <= length <= frame.size:
        return FOREIGN
    return POISONED if frame[1] & POISONED_FLAG else length


@inlined
def _read_counts(frame, lengths, budgets, counts):
    """How many entries there are in all, or -1 if a block has more than it may."""
    size = _count_bytes(budgets)
    total = 0
    for b in range(counts.size):
        count = _read_number(frame, HEADER_SIZE + b * size, size)
        if count > min(budgets[b], lengths[b]):
            return -1
        counts[b] = count
        total += count
    return total


@inlined
def _all_finite(words, step, mask):
    """Whether none of every `step`-th word, the upper half of a code or all of it, has all bits of the mask."""
    fine = True
    for i in range(step - 1, words.size, step):
        fine &= (words[i] & mask) != mask
    return fine


@inlined
def _codes_are_finite(codes, total, value_bits, not_finite):
    """Whether none of the `total` codes, given as the bytes of their memory, has all bits of `not_finite`."""
    if not_finite == 0:
        return True
    if value_bits <= 8:
        return _all_finite(codes[:total], 1, np.uint8(not_finite))
    upper = np.uint16(not_finite >> (value_bits - 16))
    return _all_finite(codes[: total * value_bits // 8].view(np.uint16), value_bits // 16, upper)


@inlined
def _scales_are_fine(scales, largest):
    """Whether no scale is NaN or larger than this."""
    fine = True
    for b in range(scales.size):
        fine &= abs(scales[b]) <= largest
    return fine


@inlined
def _ascend_within(indices, length):
    fine = indices.size == 0 or (indices[0] >= 0 and indices[-1] < length)
    for i in range(1, indices.size):
        fine &= indices[i - 1] < indices[i]
    return fine


@inlined
def _read_raw(data, counts, lengths, indices, total):
    """Read indices that stand in the data as they are. Whether they ascend within their blocks and use up the data."""
    if data.size != 4 * total:
        return False
    _copy(indices.view(np.uint8), 0, data, 0, data.size)
    done = 0
    fine = True
    for b in range(counts.size):
        fine &= _ascend_within(indices[done : done + counts[b]], lengths[b])
        done += counts[b]
    return fine


@inlined
def _read_indices(data, coding, counts, lengths, indices, total):
    """Read the indices, which end the frame. Whether they are all right."""
    if coding == RAW:
        return _read_raw(data, counts, lengths, indices, total)
    if coding == FIXED:
        return read_fixed(data, counts, lengths, indices)
    bits = read_gaps(data, _plan(counts, lengths), counts, lengths, indices)
    return bits >= 0 and (bits + 7) // 8 == data.size


@compiled(
    "int64(uint8[::1], int64, int64, int64, boolean, int64, int64, float64, int64[::1], int64[::1], int64[::1],"
    " float32[::1], uint8[::1], int32[::1])"
)
def read_frame(
    data, flags, coding, value_bits, signed, not_finite, per_scale, largest_scale, lengths, budgets,
    counts, scales, codes, indices
):  # fmt: skip
    """Open the frame that `data` begins with; return how many entries it has, or a verdict.

    Codes go to memory that is given as bytes. There is room for as many entries and scales as the budgets allow.
    """
    length = _judge_header(data, flags, counts.size)
    if length < 0:
        return length
    frame = data[:length]
    at = HEADER_SIZE + counts.size * _count_bytes(budgets)
    if frame.size < at:
        return TOO_SHORT
    total = _read_counts(frame, lengths, budgets, counts)
    if total < 0:
        return TOO_MANY
    scaled = _count_scales(counts, per_scale)
    if frame.size < at + 4 * scaled + (total * value_bits + 7) // 8:
        return TOO_SHORT
    at += _copy(scales.view(np.uint8), 0, frame, at, 4 * scaled)
    if 0 < value_bits < 8:
        at += unpack_narrow(codes, total, frame, at, value_bits, signed)
    else:
        at += _copy(codes, 0, frame, at, total * value_bits // 8)
    if not _codes_are_finite(codes, total, value_bits, not_finite):
        return NOT_FINITE
    if not _read_indices(frame[at:], coding, counts, lengths, indices, total):
        return ASTRAY
    return total if _scales_are_fine(scales[:scaled], largest_scale) else NOT_FINITE
