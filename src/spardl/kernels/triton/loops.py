"""What runs on a GPU, one function per pass over memory, in Triton. Nothing is compiled or tuned at import.

`kernels/triton/__init__.py` launches them, and results have the bits of the other kernels.
"""

import triton
import triton.language as tl

TILE = 1024  # elements that one program is about

# A product and a sum that are fused are rounded once instead of twice, and bits would differ from those of a CPU.
OPTIONS = {"enable_fp_fusion": False}


# --- natural order and block order: a program per tile of what is added ----------------------------------------------


@triton.jit
def _places(starts, wanted, offset, length, chunk, count, TILE: tl.constexpr):
    """Of a tile of elements from natural position `offset` on: which they are, which lie in wanted blocks, and where in
    block order."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    position = offset + index
    piece = position // chunk
    block = piece % count
    here = index < length
    here = here & (tl.load(wanted + block, mask=here, other=0) != 0)
    return index, here, tl.load(starts + block, mask=here, other=0) + (piece // count) * chunk + position % chunk


@triton.jit
def _note(flag, values):
    """`flag` becomes 0 if a value is not finite."""
    bits = values.to(tl.int32, bitcast=True)
    nothing = tl.zeros_like(bits)
    tl.store(flag + nothing, nothing.to(tl.int8), mask=(bits & 0x7F800000) == 0x7F800000)


@triton.jit
def accumulate(
    acc, gradient, starts, wanted, flag, offset, length, chunk, count, scale: tl.float32, TILE: tl.constexpr
):
    """Add `scale * gradient` to `acc` in the wanted blocks; there `gradient` becomes what `acc` held. `flag` becomes
    0 where a sum is not finite."""
    index, here, place = _places(starts, wanted, offset, length, chunk, count, TILE)
    before = tl.load(acc + place, mask=here, other=0.0)
    after = before + tl.load(gradient + index, mask=here, other=0.0) * scale
    tl.store(acc + place, after, mask=here)
    tl.store(gradient + index, before, mask=here)
    _note(flag, after)


@triton.jit
def differ(acc, shared, own, starts, wanted, flag, offset, length, chunk, count, TILE: tl.constexpr):
    """Set `acc` to `shared - own` in the wanted blocks. `flag` becomes 0 where a difference is not finite."""
    index, here, place = _places(starts, wanted, offset, length, chunk, count, TILE)
    difference = tl.load(shared + index, mask=here, other=0.0) - tl.load(own + index, mask=here, other=0.0)
    tl.store(acc + place, difference, mask=here)
    _note(flag, difference)


@triton.jit
def accumulate_momentum(
    acc,
    velocity,
    updated,
    gradient,
    weights,
    starts,
    wanted,
    flag,
    offset,
    length,
    chunk,
    count,
    nesterov,
    scale: tl.float32,
    momentum: tl.float32,
    decay: tl.float32,
    damping: tl.float32,
    TILE: tl.constexpr,
):
    """As `accumulate`, but add momentum's direction (kernels/api.py); the new velocity goes to `updated`."""
    index, here, place = _places(starts, wanted, offset, length, chunk, count, TILE)
    fresh = tl.load(gradient + index, mask=here, other=0.0) * scale
    fresh += decay * tl.load(weights + index, mask=here, other=0.0)
    speed = momentum * tl.load(velocity + place, mask=here, other=0.0) + damping * fresh
    before = tl.load(acc + place, mask=here, other=0.0)
    after = before + tl.where(nesterov != 0, fresh + momentum * speed, speed)
    tl.store(acc + place, after, mask=here)
    tl.store(updated + place, speed, mask=here)
    tl.store(gradient + index, before, mask=here)
    _note(flag, after)


# --- entries, and what exceeds a threshold: a program per tile --------------------------------------------------------


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


@triton.jit
def round_fp16(values, codes, length, TILE: tl.constexpr):
    """The nearest fp16, ties to even, at most the largest finite one, as its bits; infinities and NaN stay."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    value = tl.load(values + index, mask=here, other=0.0)
    finite = (value.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    value = tl.where(finite, tl.minimum(tl.maximum(value, -65504.0), 65504.0), value)
    tl.store(codes + index, value.to(tl.float16).to(tl.int16, bitcast=True), mask=here)


@triton.jit
def find_largest(values, owners, keys, length, TILE: tl.constexpr):
    """Raise the key of each block to that of its largest magnitude."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    key = tl.load(values + index, mask=here, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(keys + tl.load(owners + index, mask=here, other=0), key, mask=here)


@triton.jit
def round_steps(values, owners, scales, codes, length, levels: tl.float32, TILE: tl.constexpr):
    """Values as the nearest whole numbers of their block's steps, ties to even, from -`levels` to `levels`."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    step = tl.load(scales + tl.load(owners + index, mask=here, other=0), mask=here, other=0.0)
    value = tl.load(values + index, mask=here, other=0.0)
    steps = tl.where(step > 0.0, tl.div_rn(value, tl.where(step > 0.0, step, 1.0)), 0.0)
    steps = tl.minimum(tl.maximum(steps, -levels), levels)
    steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2**23: what is left of a small number is whole
    tl.store(codes + index, steps.to(tl.int8), mask=here)


@triton.jit
def widen_steps(codes, owners, scales, values, length, TILE: tl.constexpr):
    """The values of so many steps."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    step = tl.load(scales + tl.load(owners + index, mask=here, other=0), mask=here, other=0.0)
    tl.store(values + index, tl.load(codes + index, mask=here, other=0).to(tl.float32) * step, mask=here)


# --- the largest entries of blocks: a program per tile and block -----------------------------------------------------


@triton.jit
def _keys(values, first, stop, TILE: tl.constexpr):
    """Of a tile of a block: where its values lie, which are in the block, and their magnitudes as numbers that order
    alike."""
    place = first + tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = place < stop
    value = tl.load(values + place, mask=here, other=0.0)
    return place, here, value, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def count_digits(values, firsts, stops, prefixes, counts, shift, TILE: tl.constexpr):
    """How many keys of each block begin with its prefix and go on with each digit of 8 bits at `shift`."""
    block = tl.program_id(1)
    _place, here, _value, key = _keys(values, tl.load(firsts + block), tl.load(stops + block), TILE)
    long = key.to(tl.int64)
    here = here & ((long >> (shift + 8)) == tl.load(prefixes + block))
    found = tl.histogram(((long >> shift) & 255).to(tl.int32), 256, mask=here)
    tl.atomic_add(counts + block * 256 + tl.arange(0, 256), found)


@triton.jit
def count_chosen(values, firsts, stops, lasts, above, ties, tiles, TILE: tl.constexpr):
    """How many keys of each tile are above the last one that its block chooses, and how many equal it."""
    block = tl.program_id(1)
    _place, here, _value, key = _keys(values, tl.load(firsts + block), tl.load(stops + block), TILE)
    last = tl.load(lasts + block).to(tl.int32)
    at = block * tiles + tl.program_id(0)
    tl.store(above + at, tl.sum((here & (key > last)).to(tl.int64), 0))
    tl.store(ties + at, tl.sum((here & (key == last)).to(tl.int64), 0))


@triton.jit
def take_chosen(values, firsts, stops, lasts, needed, above, ties, starts, indices, taken, tiles, TILE: tl.constexpr):
    """Move out what is above the last key of its block, and the first `needed` that equal it, in order. `above` and
    `ties` say how many earlier tiles of the block have; its entries begin at `starts`."""
    block = tl.program_id(1)
    first = tl.load(firsts + block)
    place, here, value, key = _keys(values, first, tl.load(stops + block), TILE)
    last, need, at = tl.load(lasts + block).to(tl.int32), tl.load(needed + block), block * tiles + tl.program_id(0)
    tied = here & (key == last)
    before = tl.load(ties + at)
    rank = before + tl.cumsum(tied.to(tl.int64), 0) - 1
    chosen = (here & (key > last)) | (tied & (rank < need))
    slot = tl.load(starts + block) + tl.load(above + at) + tl.minimum(before, need)
    slot += tl.cumsum(chosen.to(tl.int64), 0) - 1
    tl.store(indices + slot, (place - first).to(tl.int32), mask=chosen)
    tl.store(taken + slot, value, mask=chosen)
    tl.store(values + place, tl.zeros_like(value), mask=chosen)


# --- indices in the fixed code (kernels/cpu/fixed.py) -----------------------------------------------------------------
# Of each block, five numbers: entries before it, entries, low bits of each, and where those begin and the rest does.


@triton.jit
def write_fixed(indices, blocks, words, TILE: tl.constexpr):
    """Set the bits of all indices in words of 32 bits that were zero."""
    plan = blocks + tl.program_id(1) * 5
    count, width = tl.load(plan + 1), tl.load(plan + 2)
    order = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = order < count
    rest = tl.load(indices + tl.load(plan) + order, mask=here, other=0).to(tl.int64) - order
    at = tl.load(plan + 3) + order * width
    low = (rest & ((1 << width) - 1)) << (at & 31)
    tl.atomic_or(words + (at >> 5), low.to(tl.int32), mask=here)
    tl.atomic_or(words + (at >> 5) + 1, (low >> 32).to(tl.int32), mask=here)
    high = tl.load(plan + 4) + (rest >> width) + order
    one = (tl.full((TILE,), 1, tl.int64) << (high & 31)).to(tl.int32)
    tl.atomic_or(words + (high >> 5), one, mask=here)


@triton.jit
def _ones(words, plan, size, TILE: tl.constexpr):
    """Of a tile of a block's stretch: which bit each is, and whether it is set."""
    bit = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = tl.load(plan + 4) + bit
    word = tl.load(words + (at >> 5), mask=bit < size, other=0)
    return bit, ((word >> (at & 31).to(tl.int32)) & 1).to(tl.int64)


@triton.jit
def count_ones(words, blocks, sizes, counts, tiles, TILE: tl.constexpr):
    """How many bits of each tile of each block's stretch are set."""
    block = tl.program_id(1)
    _bit, one = _ones(words, blocks + block * 5, tl.load(sizes + block), TILE)
    tl.store(counts + block * tiles + tl.program_id(0), tl.sum(one, 0))


@triton.jit
def read_fixed(words, blocks, sizes, before, indices, tiles, TILE: tl.constexpr):
    """The index of every one, of which earlier tiles of its block have had `before`; those that there is room for."""
    block = tl.program_id(1)
    plan = blocks + block * 5
    count, width = tl.load(plan + 1), tl.load(plan + 2)
    bit, one = _ones(words, plan, tl.load(sizes + block), TILE)
    order = tl.load(before + block * tiles + tl.program_id(0)) + tl.cumsum(one, 0) - 1
    here = (one != 0) & (order < count)
    at = tl.load(plan + 3) + order * width
    low = tl.load(words + (at >> 5), mask=here, other=0).to(tl.int64) & 0xFFFFFFFF
    low |= (tl.load(words + (at >> 5) + 1, mask=here, other=0).to(tl.int64) & 0xFFFFFFFF) << 32
    rest = ((bit - order) << width) | ((low >> (at & 31)) & ((1 << width) - 1))
    tl.store(indices + tl.load(plan) + order, rest + order, mask=here)
