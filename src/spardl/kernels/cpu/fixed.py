"""Index coding of fixed length, compiled: as many bits as the counts and lengths of blocks say, whatever the indices.

Of ascending indices, each less the number of those before it, the low l bits are stored as they are, and the rest as
where ones stand in a stretch of count + ((length - count) >> l) bits (Elias and Fano). First come the low bits of all
entries of a block, then that stretch. Every bit has its place before anything is known of other entries, so a device
writes and reads all of them at once; and l is that of Rice coding (gaps.py), whose worst case this always takes.
"""

import numpy as np

from spardl.kernels.cpu.gaps import plan_block
from spardl.kernels.cpu.jit import inlined


@inlined
def _bit(data, at):
    return (data[at >> 3] >> np.uint8(at & 7)) & np.uint8(1)


@inlined
def _set(out, at):
    out[at >> 3] |= np.uint8(1 << (at & 7))


@inlined
def write_fixed(out, counts, lengths, indices):
    """Write every block's indices into `out`, one stream of bits; return its length in bytes."""
    first = done = np.int64(0)
    bits = np.int64(0)
    for b in range(counts.size):
        bits += plan_block(counts[b], lengths[b])[1]
    for byte in range((bits + 7) // 8):
        out[byte] = 0
    for b in range(counts.size):
        width, size = plan_block(counts[b], lengths[b])
        high = first + width * counts[b]
        for i in range(counts[b]):
            rest = np.int64(indices[done + i]) - i
            for bit in range(width):
                if (rest >> bit) & 1:
                    _set(out, first + width * i + bit)
            _set(out, high + (rest >> width) + i)
        done += counts[b]
        first += size
    return (bits + 7) // 8


@inlined
def read_fixed(data, counts, lengths, indices):
    """Undo `write_fixed`. Whether the data is as long as it must be, and indices ascend within their blocks."""
    first = done = bits = np.int64(0)
    for b in range(counts.size):
        bits += plan_block(counts[b], lengths[b])[1]
    if data.size != (bits + 7) // 8:
        return False
    fine = True
    for b in range(counts.size):
        width, size = plan_block(counts[b], lengths[b])
        high = first + width * counts[b]
        found = np.int64(0)
        last = np.int64(-1)
        for at in range(high, first + size):
            if not _bit(data, at):
                continue
            if found == counts[b]:
                return False
            rest = np.int64(0)
            for bit in range(width):
                rest |= np.int64(_bit(data, first + width * found + bit)) << bit
            index = ((at - high - found) << width) + rest + found
            fine &= last < index < lengths[b]
            last = index
            indices[done + found] = index
            found += 1
        if found != counts[b]:
            return False
        done += counts[b]
        first += size
    return fine
