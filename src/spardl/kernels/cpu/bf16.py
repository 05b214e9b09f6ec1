"""Values as they travel, compiled."""

import numpy as np

from spardl.kernels.cpu.jit import INFINITE_KEY, MAGNITUDE, compiled, inlined

LARGEST_BF16 = np.uint32(0x7F7F0000)  # the largest finite bf16, as a float32


@inlined
def nearest_bf16(bits):
    """The float32 that is the nearest bf16, ties to even, the largest finite one instead of infinity; as bits."""
    key = bits & MAGNITUDE
    near = key + np.uint32(0x7FFF) + ((key >> np.uint32(16)) & np.uint32(1))
    near &= np.uint32(0xFFFF0000)
    if near >= INFINITE_KEY > key:
        near = LARGEST_BF16
    return near | (bits & np.uint32(0x80000000))


@compiled("void(float32[::1], uint16[::1], float32[::1])")
def round_bf16(values, codes, errors):
    """The nearest bf16 of each value, and what rounding cost."""
    bits, rounded = values.view(np.uint32), errors.view(np.uint32)
    for i in range(values.size):
        near = nearest_bf16(bits[i])
        codes[i] = np.uint16(near >> np.uint32(16))
        rounded[i] = near
    for i in range(values.size):
        errors[i] = values[i] - errors[i]


@compiled("void(uint16[::1], float32[::1])")
def widen_bf16(codes, values):
    """Each bf16 as a float32."""
    bits = values.view(np.uint32)
    for i in range(codes.size):
        bits[i] = np.uint32(codes[i]) << np.uint32(16)
