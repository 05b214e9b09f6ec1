"""Index coding, compiled: gaps between ascending indices, Rice-coded.

A gap g (zeros skipped since the last entry) is split at bit l: its low l bits are stored as they are, g >> l in unary;
first the low bits of all gaps of a block, then their quotients. For a random subset of density p this takes about
log2(1/p) + 1.46 bits per entry, 0.03 above its entropy, and it can never take more than Elias-Fano coding would,
because the quotients of one block cannot sum to more than length >> l: so the receiver knows the largest possible size
from counts and lengths alone. Any bit string decodes to ascending indices; only the last one can leave the block.
"""

import numpy as np

from spardl.kernels.cpu.intrinsics import lowest_bit, put_word, word_at
from spardl.kernels.cpu.jit import compiled, inlined


@inlined
def plan_block(count, length):
    """The number of low bits with the smallest worst case, and that case's bits. Both sides compute it."""
    zeros = length - count
    best, worst = 0, count + zeros if count else 0
    for width in range(1, 32):
        bits = count * (width + 1) + (zeros >> width)
        if bits < worst:
            best, worst = width, bits
    return best, worst


@inlined
def _flush(out, byte, pending, held):
    """Write all whole bytes of the `held` pending bits, less than 64; return where to go on, and the bits left."""
    whole = held >> 3
    if byte + 8 <= out.size:
        put_word(out, byte, pending)
    else:
        for b in range(whole):
            out[byte + b] = np.uint8((pending >> np.uint64(8 * b)) & np.uint64(255))
    return byte + whole, pending >> np.uint64(8 * whole), held & 7


@inlined
def _write_block(out, byte, pending, held, low_bits, indices):
    """Append the gaps between ascending indices to the bit stream; `held` bits, lowest first, are not yet written."""
    mask = np.uint64((1 << low_bits) - 1)
    previous = -1
    for i in range(indices.size):
        if held + low_bits >= 64:
            byte, pending, held = _flush(out, byte, pending, held)
        pending |= (np.uint64(indices[i] - previous - 1) & mask) << np.uint64(held)
        previous = indices[i]
        held += low_bits
    byte, pending, held = _flush(out, byte, pending, held)
    previous = -1
    for i in range(indices.size):
        zeros = (indices[i] - previous - 1) >> low_bits
        previous = indices[i]
        if held + zeros >= 63:
            byte, pending, held = _flush(out, byte, pending, held)
            while zeros >= 32:
                byte, pending, held = _flush(out, byte, pending, held + 32)
                zeros -= 32
        held += zeros
        pending |= np.uint64(1) << np.uint64(held)
        held += 1
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
    """Undo `_write_block`; return the new cursor, or -1 if the bits run out or an index leaves [0, length).

    Where the i-th one among the quotients stands says what the first i quotients sum to. So the ones of a word are read
    off, one after the other, and the last of these ascending indices tells whether any leaves the block.
    """
    limit = data.size * 8
    high = cursor + low_bits * indices.size
    if high + indices.size > limit:
        return np.int64(-1)
    mask = np.uint64((1 << low_bits) - 1)
    quotients = lows = done = np.int64(0)
    first = high & ~7
    word = _word(data, high >> 3) >> np.uint64(high & 7) << np.uint64(high & 7)
    while done < indices.size:
        if word == 0:
            first += 64
            if first >= limit:
                return np.int64(-1)
            word = _word(data, first >> 3)
            continue
        quotients = first + lowest_bit(word) - high - done
        word &= word - np.uint64(1)
        lows += np.int64((_word(data, cursor >> 3) >> np.uint64(cursor & 7)) & mask)
        cursor += low_bits
        indices[done] = done + (quotients << low_bits) + lows
        done += 1
    # What is out of bounds may have overflowed where it was written, so it is looked at in two steps.
    if quotients > length >> low_bits or done - 1 + (quotients << low_bits) + lows >= length:
        return np.int64(-1)
    return high + quotients + done


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
