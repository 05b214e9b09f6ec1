"""Codes of less than a byte, compiled: one byte per entry in memory, packed without gaps in a frame.

The first code is in the lowest bits of the first byte. As 8 is a multiple of all widths, no code crosses a byte.
"""

import numpy as np

from spardl.kernels.cpu.jit import inlined


@inlined
def pack_narrow(out, at, codes, bits):
    """Write the low `bits` bits of each code, a byte, to `out` from `at` on; return how many bytes that took."""
    mask = np.uint8((1 << bits) - 1)
    each = 8 // bits
    size = (codes.size + each - 1) // each
    for byte in range(size):
        packed = np.uint8(0)
        for i in range(min(each, codes.size - byte * each)):
            packed |= (codes[byte * each + i] & mask) << np.uint8(bits * i)
        out[at + byte] = packed
    return size


@inlined
def unpack_narrow(codes, count, data, at, bits, signed):
    """Read `count` codes from `data` from `at` on, each into a byte, with its sign if there is one; return how many
    bytes they took."""
    mask = np.uint8((1 << bits) - 1)
    sign = np.uint8(1 << (bits - 1)) if signed else np.uint8(0)
    each = 8 // bits
    size = (count + each - 1) // each
    for byte in range(size):
        packed = data[at + byte]
        for i in range(min(each, count - byte * each)):
            field = (packed >> np.uint8(bits * i)) & mask
            codes[byte * each + i] = np.uint8((field ^ sign) - sign)
    return size
