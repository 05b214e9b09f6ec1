"""Whole frames, compiled: packed straight into the buffer that is sent, opened straight from the one that arrived.

wire/frame.py describes the format.
"""

import numpy as np

from spardl.kernels._gaps import plan_block, read_gaps, write_gaps
from spardl.kernels._numba import compiled, inlined
from spardl.kernels.frames import ASTRAY, FOREIGN, NOT_FINITE, POISONED, POISONED_FLAG, TOO_MANY, TOO_SHORT, VERSION
from spardl.kernels.frames import HEADER as _HEADER

HEADER = _HEADER.size


@inlined
def _count_bytes(budgets):
    """Bytes of a count: as many as the largest budget needs."""
    largest = 0
    for b in range(budgets.size):
        largest = max(largest, budgets[b])
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4


@compiled("int64(int64[::1], int64[::1], int64, boolean, boolean)")
def frame_room(lengths, budgets, value_bytes, scaled, raw):
    """The most bytes that a frame for blocks of these lengths and budgets can have."""
    entries = bits = 0
    for b in range(budgets.size):
        entries += budgets[b]
        bits += 32 * budgets[b] if raw else plan_block(budgets[b], lengths[b])[1]
    return HEADER + budgets.size * (_count_bytes(budgets) + 4 * scaled) + entries * value_bytes + (bits + 7) // 8


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
    "int64(uint8[::1], int64, boolean, int64[::1], int64[::1], int64[::1], uint8[::1], uint8[::1], int32[::1],"
    " uint8[::1])"
)
def write_frame(out, flags, raw, lengths, budgets, counts, scales, codes, indices, index_bytes):
    """Write a frame; return its length. Scales and codes come as bytes; `index_bytes` is the memory of `indices`."""
    at = HEADER
    size = _count_bytes(budgets)
    for b in range(counts.size):
        at = _write_number(out, at, counts[b], size)
    at += _copy(out, at, scales, 0, scales.size)
    at += _copy(out, at, codes, 0, codes.size)
    if raw:
        at += _copy(out, at, index_bytes, 0, index_bytes.size)
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
    if frame.size < HEADER or frame[0] != VERSION or (frame[1] & ~POISONED_FLAG) != flags:
        return FOREIGN
    length = _read_number(frame, 4, 4)
    if _read_number(frame, 2, 2) != blocks or not HEADER <= length <= frame.size:
        return FOREIGN
    return POISONED if frame[1] & POISONED_FLAG else length


@inlined
def _read_counts(frame, lengths, budgets, counts):
    """How many entries there are in all, or -1 if a block has more than it may."""
    size = _count_bytes(budgets)
    total = 0
    for b in range(counts.size):
        count = _read_number(frame, HEADER + b * size, size)
        if count > min(budgets[b], lengths[b]):
            return -1
        counts[b] = count
        total += count
    return total


@inlined
def _all_finite(words, step, exponents):
    """Whether none of every `step`-th 16-bit word, the upper half of a float's bits or all of them, has these all."""
    fine = True
    for i in range(step - 1, words.size, step):
        fine &= (words[i] & exponents) != exponents
    return fine


@inlined
def _ascend_within(indices, length):
    fine = indices.size == 0 or (indices[0] >= 0 and indices[-1] < length)
    for i in range(1, indices.size):
        fine &= indices[i - 1] < indices[i]
    return fine


@compiled(
    "int64(uint8[::1], int64, boolean, int64, int64, int64[::1], int64[::1], int64[::1], uint8[::1], uint8[::1],"
    " uint16[::1], int32[::1], uint8[::1])"
)
def read_frame(
    data, flags, raw, value_bytes, exponents, lengths, budgets, counts, scales, codes, words, indices, index_bytes
):  # fmt: skip
    """Open the frame that `data` begins with; return how many entries it has, or what is wrong with it.

    Scales and codes go to memory that is given as bytes; `words` is that of the codes, and `index_bytes` that of
    `indices`. `exponents` are the bits that are all set in what is not finite, 0 for codes that are always finite.
    """
    length = _judge_header(data, flags, counts.size)
    if length < 0:
        return length
    frame = data[:length]
    at = HEADER + counts.size * _count_bytes(budgets)
    if frame.size < at:
        return TOO_SHORT
    total = _read_counts(frame, lengths, budgets, counts)
    if total < 0:
        return TOO_MANY
    if frame.size < at + scales.size + total * value_bytes:
        return TOO_SHORT
    at += _copy(scales, 0, frame, at, scales.size)
    at += _copy(codes, 0, frame, at, total * value_bytes)
    if exponents and not _all_finite(words[: total * value_bytes // 2], value_bytes // 2, np.uint16(exponents)):
        return NOT_FINITE
    if not raw:
        bits = read_gaps(frame[at:], _plan(counts, lengths), counts, lengths, indices)
        return total if bits >= 0 and (bits + 7) // 8 == frame.size - at else ASTRAY
    if frame.size - at != 4 * total:
        return ASTRAY
    _copy(index_bytes, 0, frame, at, 4 * total)
    done = 0
    for b in range(counts.size):
        if not _ascend_within(indices[done : done + counts[b]], lengths[b]):
            return ASTRAY
        done += counts[b]
    return total
