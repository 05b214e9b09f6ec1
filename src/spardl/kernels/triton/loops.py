"""What runs on a GPU, one function per pass over memory, in Triton. Nothing is compiled or tuned at import.

`kernels/triton/__init__.py` launches them, without fused multiply-adds: results have the bits of the other kernels.
"""

import triton
import triton.language as tl


@triton.jit
def accumulate(
    acc, gradient, starts, wanted, flag, offset, length, chunk, count, scale: tl.float32, TILE: tl.constexpr
):
    """Add `scale * gradient` to `acc` in the wanted blocks; there `gradient` becomes what `acc` held. `flag` becomes
    0 where a sum is not finite."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    position = offset + index
    piece = position // chunk
    block = piece % count
    here = index < length
    here = here & (tl.load(wanted + block, mask=here, other=0) != 0)
    place = tl.load(starts + block, mask=here, other=0) + (piece // count) * chunk + position % chunk
    before = tl.load(acc + place, mask=here, other=0.0)
    after = before + tl.load(gradient + index, mask=here, other=0.0) * scale
    tl.store(acc + place, after, mask=here)
    tl.store(gradient + index, before, mask=here)
    bits = after.to(tl.int32, bitcast=True)
    tl.store(flag + tl.zeros_like(index), tl.zeros_like(index).to(tl.int8), mask=(bits & 0x7F800000) == 0x7F800000)


@triton.jit
def count_above(values, counts, length, threshold: tl.float32, TILE: tl.constexpr):
    """How many values of each tile have magnitude `threshold` or more; zeros never count."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(values + index, mask=index < length, other=0.0)
    chosen = (tl.abs(value) >= threshold) & (value != 0.0)
    tl.store(counts + tl.program_id(0), tl.sum(chosen.to(tl.int64), 0))


@triton.jit
def take_above(values, before, indices, taken, length, limit, threshold: tl.float32, TILE: tl.constexpr):
    """Move those out, in order, as long as there are fewer than `limit`; `before` says how many earlier tiles have."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(values + index, mask=index < length, other=0.0)
    chosen = (tl.abs(value) >= threshold) & (value != 0.0)
    place = tl.load(before + tl.program_id(0)) + tl.cumsum(chosen.to(tl.int64), 0) - 1
    chosen = chosen & (place < limit)
    tl.store(indices + place, index.to(tl.int32), mask=chosen)
    tl.store(taken + place, value, mask=chosen)
    tl.store(values + index, tl.zeros_like(value), mask=chosen)


@triton.jit
def scatter_add(acc, firsts, indices, values, length, TILE: tl.constexpr):
    """Add each value at its index in its block, which begins at `firsts`. No place occurs twice."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    place = tl.load(firsts + index, mask=here, other=0) + tl.load(indices + index, mask=here, other=0)
    held = tl.load(acc + place, mask=here, other=0.0)
    tl.store(acc + place, held + tl.load(values + index, mask=here, other=0.0), mask=here)


@triton.jit
def round_bf16(values, codes, errors, length, TILE: tl.constexpr):
    """The nearest bf16 of finite values, ties to even, at most the largest finite one, as its bits; and the errors."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    value = tl.load(values + index, mask=here, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F7F0000)
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    code = rounded | ((bits >> 16) & 0x8000)
    tl.store(codes + index, code.to(tl.int16), mask=here)
    tl.store(errors + index, value - (code << 16).to(tl.float32, bitcast=True), mask=here)
