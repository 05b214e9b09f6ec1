"""Rice-coded gaps, compiled: the low bits of all gaps of a block, then their quotients in unary. See wire/gaps.py."""

import numpy as np

from spardl.kernels._lanes import lowest_bit, word_at
from spardl.kernels._numba import compiled, inlined


@compiled("void(int64[::1], int64[::1], int64[::1], int64[::1])")
def plan_gaps(counts, lengths, widths, worst):
    """For each block the number of low bits with the smallest worst case, and that case's bits."""
    for b in range(counts.size):
        count, zeros = counts[b], lengths[b] - counts[b]
        widths[b] = 0
        worst[b] = count + zeros if count else 0
        for width in range(1, 32):
            bits = count * (width + 1) + (zeros >> width)
            if bits < worst[b]:
                widths[b] = width
                worst[b] = bits


@inlined
def _flush(out, byte, pending, held):
    """Write all whole bytes of the `held` pending bits; return where to go on, and the bits that are left."""
    while held >= 8:
        out[byte] = np.uint8(pending & np.uint64(255))
        pending >>= np.uint64(8)
        byte += 1
        held -= 8
    return byte, pending, held


@inlined
def _write_block(out, byte, pending, held, low_bits, indices):
    """Append the gaps between ascending indices to the bit stream; `held` bits, lowest first, are not yet written."""
    mask = np.uint64((1 << low_bits) - 1)
    previous = -1
    for i in range(indices.size):
        pending |= (np.uint64(indices[i] - previous - 1) & mask) << np.uint64(held)
        previous = indices[i]
        held += low_bits
        if held >= 32:
            byte, pending, held = _flush(out, byte, pending, held)
    byte, pending, held = _flush(out, byte, pending, held)
    previous = -1
    for i in range(indices.size):
        zeros = (indices[i] - previous - 1) >> low_bits
        previous = indices[i]
        while zeros >= 32:
            byte, pending, held = _flush(out, byte, pending, held + 32)
            zeros -= 32
        held += zeros
        pending |= np.uint64(1) << np.uint64(held)
        held += 1
        if held >= 32:
            byte, pending, held = _flush(out, byte, pending, held)
    return _flush(out, byte, pending, held)


@inlined
def _word(data, first):
    """Eight bytes from `first` on as one word; behind the end there are zeros."""
    if first + 8 <= data.size:
        return word_at(data, first)
    word = np.uint64(0)
    for b in range(max(0, data.size - first)):
        word |= np.uint64(data[first + b]) << np.uint64(8 * b)
    return word


@inlined
def _read_block(data, cursor, low_bits, length, indices):
    """Undo `_write_block`; return the new cursor, or -1 if the bits run out or an index leaves [0, length)."""
    limit = data.size * 8
    high = cursor + low_bits * indices.size
    if high + indices.size > limit:
        return np.int64(-1)
    mask = np.uint64((1 << low_bits) - 1)
    most = length >> low_bits  # a larger quotient leaves the block, and might overflow when it is shifted
    index = np.int64(-1)
    for i in range(indices.size):
        quotient = -high
        rest = _word(data, high >> 3) >> np.uint64(high & 7)
        while rest == 0:
            high = (high & ~7) + 64
            if high >= limit:
                return np.int64(-1)
            rest = _word(data, high >> 3)
        high += lowest_bit(rest)
        quotient += high
        high += 1
        if quotient > most:
            return np.int64(-1)
        low = (_word(data, cursor >> 3) >> np.uint64(cursor & 7)) & mask
        cursor += low_bits
        index += 1 + (quotient << low_bits) + np.int64(low)
        if index >= length:
            return np.int64(-1)
        indices[i] = index
    return high


@compiled("int64(uint8[::1], int64[::1], int64[::1], int32[::1])")
def write_gaps(out, low_bits, counts, indices):
    """Write every block's gaps into `out`, one bit stream; return its length in bytes."""
    byte = held = done = np.int64(0)
    pending = np.uint64(0)
    for b in range(counts.size):
        block = indices[done : done + counts[b]]
        byte, pending, held = _write_block(out, byte, pending, held, low_bits[b], block)
        done += counts[b]
    if held:
        out[byte] = np.uint8(pending)
        byte += 1
    return byte


@compiled("int64(uint8[::1], int64[::1], int64[::1], int64[::1], int32[::1])")
def read_gaps(data, low_bits, counts, lengths, indices):
    """Undo `write_gaps`; return the length in bits, or -1 if the stream does not hold these counts."""
    cursor = np.int64(0)
    done = 0
    for b in range(counts.size):
        cursor = _read_block(data, cursor, low_bits[b], lengths[b], indices[done : done + counts[b]])
        if cursor < 0:
            return cursor
        done += counts[b]
    return cursor
