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


@triton.jit
def count_bins(values, counts, first, shift, bins, length, TILE: tl.constexpr):
    """How many magnitudes lie in each of `bins` bins of 2**shift bit patterns, from bin `first` up; those above the
    last count in it."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < length
    key = tl.load(values + index, mask=here, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    place = tl.minimum((key >> shift).to(tl.int64) - first, bins - 1)
    tl.atomic_add(counts + place, tl.full((TILE,), 1, tl.int64), mask=here & (place >= 0))


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
def next_digit(counts, prefixes, needed, TILE: tl.constexpr):
    """One more digit of each block's last key, where `counts` says how many keys go on with each; `needed` becomes how
    many of those that begin like the longer prefix are. A program per block."""
    block = tl.program_id(0)
    digit = tl.arange(0, 256)
    found = tl.load(counts + block * 256 + digit).to(tl.int64)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)  # with a larger digit
    need = tl.load(needed + block)
    chosen = tl.minimum(tl.sum((above >= need).to(tl.int64), 0), 255)
    tl.store(prefixes + block, tl.load(prefixes + block) * 256 + chosen)
    tl.store(needed + block, need - tl.sum(tl.where(digit == chosen, above, 0), 0))


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
def _chosen(key, here, lasts, needed, above, ties, tiles):
    """Of a tile of a block: which keys are above its last one, or among the first `needed` that equal it; and how many
    of the block come before each, itself among them. `above` and `ties` say how many earlier tiles have."""
    block = tl.program_id(1)
    last, need, at = tl.load(lasts + block).to(tl.int32), tl.load(needed + block), block * tiles + tl.program_id(0)
    tied = here & (key == last)
    before = tl.load(ties + at)
    rank = before + tl.cumsum(tied.to(tl.int64), 0) - 1
    chosen = (here & (key > last)) | (tied & (rank < need))
    return chosen, tl.load(above + at) + tl.minimum(before, need) + tl.cumsum(chosen.to(tl.int64), 0)


@triton.jit
def take_chosen(values, firsts, stops, lasts, needed, above, ties, starts, indices, taken, tiles, TILE: tl.constexpr):
    """Move out what is chosen, in order; the entries of a block begin at `starts`."""
    block = tl.program_id(1)
    first = tl.load(firsts + block)
    place, here, value, key = _keys(values, first, tl.load(stops + block), TILE)
    chosen, count = _chosen(key, here, lasts, needed, above, ties, tiles)
    slot = tl.load(starts + block) + count - 1
    tl.store(indices + slot, (place - first).to(tl.int32), mask=chosen)
    tl.store(taken + slot, value, mask=chosen)
    tl.store(values + place, tl.zeros_like(value), mask=chosen)


@triton.jit
def mark_chosen(values, firsts, stops, lasts, needed, above, ties, marks, tiles, TILE: tl.constexpr):
    """Mark what is chosen of the only block."""
    place, here, _value, key = _keys(values, tl.load(firsts), tl.load(stops), TILE)
    chosen, _count = _chosen(key, here, lasts, needed, above, ties, tiles)
    tl.store(marks + place, chosen.to(tl.int8), mask=here)


@triton.jit
def part_chosen(
    values, firsts, stops, lasts, needed, above, ties, indices, kept, amounts, budget, tiles, TILE: tl.constexpr
):
    """Copy the entries of the only block, those that are chosen first and the others from `budget` on, in order."""
    place, here, value, key = _keys(values, tl.load(firsts), tl.load(stops), TILE)
    chosen, count = _chosen(key, here, lasts, needed, above, ties, tiles)
    slot = tl.where(chosen, count - 1, budget + place - count)
    tl.store(kept + slot, tl.load(indices + place, mask=here, other=0), mask=here)
    tl.store(amounts + slot, value, mask=here)


# --- sums of sparse pieces: a program per tile of entries -------------------------------------------------------------


@triton.jit
def _search(ascending, count, steps, index, here):
    """How many of `count` ascending indices are smaller than each of these; 2**`steps` is more than `count`."""
    low = tl.zeros_like(index).to(tl.int64)
    high = low + count
    for _step in range(steps):
        middle = (low + high) // 2
        smaller = tl.load(ascending + middle, mask=here & (middle < high), other=0) < index
        low = tl.where(smaller & (middle < high), middle + 1, low)
        high = tl.where(smaller, high, middle)
    return low


@triton.jit
def find_pairs(left, right, paired, lefts, rights, steps, TILE: tl.constexpr):
    """Which indices on the left are on the right as well, as ones behind the first element of `paired`."""
    entry = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = entry < lefts
    index = tl.load(left + entry, mask=here, other=0)
    place = _search(right, rights, steps, index, here)
    other = tl.load(right + place, mask=here & (place < rights), other=-1)
    tl.store(paired + entry + 1, (other == index).to(tl.int64), mask=here)


@triton.jit
def merge(left, left_values, right, right_values, pairs, indices, values, lefts, rights, steps, TILE: tl.constexpr):
    """Write the sum of two ascending pieces of a block over zeros at its first places; `pairs` says how many indices
    there are in both before each on the left, and in all.

    An entry has as many before it as have smaller indices, and as many zeros more as there are pairs, or free places
    before it. So nothing is sorted, and what nobody writes to is a zero in the right place.
    """
    entry = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    ours = entry < lefts
    theirs = (entry >= lefts) & (entry < lefts + rights)
    index = tl.load(left + entry, mask=ours, other=0) + tl.load(right + entry - lefts, mask=theirs, other=0)
    before = tl.where(ours, entry, _search(left, lefts, steps, index, theirs))  # on the left
    beyond = tl.where(ours, _search(right, rights, steps, index, ours), entry - lefts)  # on the right
    other = tl.load(right + beyond, mask=ours & (beyond < rights), other=-1)
    again = theirs & (tl.load(left + before, mask=theirs & (before < lefts), other=-1) == index)
    mine = tl.load(left_values + entry, mask=ours, other=0.0)
    both = mine + tl.load(right_values + beyond, mask=ours & (other == index), other=0.0)
    value = tl.where(ours, tl.where(other == index, both, mine), tl.load(right_values + beyond, mask=theirs, other=0.0))
    written = (ours | theirs) & (again == 0)
    rank = before + beyond - tl.load(pairs + before, mask=written, other=0)
    place = rank + tl.minimum(index - rank, tl.load(pairs + lefts))
    tl.store(indices + place, index, mask=written)
    tl.store(values + place, value, mask=written)


# --- values as levels (wire/format.py, LevelFormat): a program per scale and block ------------------------------------
# Of each block, three numbers: entries before it, entries, and scales before it. A scale serves two tiles at most.


@triton.jit
def _row(blocks, each, TILE: tl.constexpr):
    """Of the entries that share a scale: where they lie, which there are and how many; and where the scale lies, and
    whether it is there."""
    plan = blocks + tl.program_id(1) * 3
    begin = tl.program_id(0).to(tl.int64) * each
    count = tl.load(plan + 1)
    size = tl.minimum(tl.maximum(count - begin, 0), each)
    lane = tl.arange(0, 2 * TILE)
    exists = (begin < count) | (begin == 0)
    return tl.load(plan) + begin + lane, lane < size, size, tl.load(plan + 2) + tl.program_id(0), exists


@triton.jit
def _whole(value):
    """The nearest whole number, ties to even, of one that is far below 2**22."""
    return (value + 12582912.0) - 12582912.0  # 1.5 * 2**23


@triton.jit
def _nearest(amounts, smallest, largest, many):
    """The numbers, from 1, of the levels nearest to amounts, between these ends."""
    wide = largest > smallest
    slope = tl.where(wide, tl.div_rn(1.0, tl.where(wide, largest - smallest, 1.0)) * (many * many - 1.0), 0.0)
    squares = amounts * slope + (0.75 - smallest * slope)
    return _whole(tl.sqrt_rn(tl.minimum(tl.maximum(squares, 0.75), many * many - 0.25)))


@triton.jit
def _ends(word):
    """The smallest and the largest level that a scale says."""
    largest = (word & -65536).to(tl.float32, bitcast=True)
    return largest * ((word & 65535).to(tl.float32) * 0.0000152587890625), largest  # a 65536th


@triton.jit
def round_levels(
    values,
    blocks,
    codes,
    scales,
    each,
    levels,
    low_guess: tl.float32,
    high_guess: tl.float32,
    TILE: tl.constexpr,
):
    """Values as signs and the nearest of so many levels, whose ends are fitted by least squares and written as words.

    Sums are of whole numbers and exact; the rest is done in the order and width of `LevelFormat`.
    """
    place, here, size, scale, exists = _row(blocks, each, TILE)
    many = tl.cast(levels, tl.float32)
    bits = tl.load(values + place, mask=here, other=0.0).to(tl.int32, bitcast=True)
    key = bits & 0x7FFFFFFF
    most = tl.max(key, 0)
    high = most.to(tl.float32, bitcast=True)
    low = tl.minimum(tl.min(tl.where(here, key, 0x7FFFFFFF), 0), most).to(tl.float32, bitcast=True)
    unit = tl.maximum(tl.div_rn(high - low, 180.0), high * 0.00000095367431640625)  # 2**-20
    unit = tl.maximum(unit, 1.1754943508222875e-38)  # the smallest normal number
    amounts = tl.where(here, _whole(tl.div_rn(key.to(tl.float32, bitcast=True) - low, unit)), 0.0)

    squares = _nearest(amounts, low_guess, high_guess, many)
    squares = tl.where(here, squares * squares, 0.0)
    count = size.to(tl.float64)
    x = tl.sum(squares, 0).to(tl.float64)
    y = tl.sum(amounts, 0).to(tl.float64)
    spread = count * tl.sum(squares * squares, 0).to(tl.float64) - x * x
    slope = (count * tl.sum(squares * amounts, 0).to(tl.float64) - x * y) / tl.where(spread > 0, spread, 1.0)
    slope = tl.where(spread > 0, slope, 0.0)
    base = (y - slope * x) / tl.where(size > 0, count, 1.0)
    top = high.to(tl.float64)
    smallest = low.to(tl.float64) + unit.to(tl.float64) * (base + slope)
    largest = low.to(tl.float64) + unit.to(tl.float64) * (base + slope * tl.cast(levels * levels, tl.float64))
    smallest = tl.where(smallest < top, smallest, top).to(tl.float32)
    wide = tl.where(largest < top, largest, top).to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = tl.minimum(wide & 0x7FFFFFFF, 0x7F7F0000)  # the nearest bf16, as `round_bf16` finds it
    word = (((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16) | ((wide >> 16) & 0x8000)) << 16
    share = tl.div_rn(smallest, word.to(tl.float32, bitcast=True))
    share = tl.where(share == share, share, 0.0) * 65536.0
    word = word | _whole(tl.minimum(tl.maximum(share, 0.0), 65535.0)).to(tl.int32)
    finite = most < 0x7F800000
    tl.store(scales + scale, tl.where(finite, word, most), mask=exists)

    first, last = _ends(word)
    roots = _nearest(amounts, tl.div_rn(first - low, unit), tl.div_rn(last - low, unit), many)
    code = ((tl.where(finite, roots, 1.0) - 1.0).to(tl.int32) & (levels - 1)) | ((bits >> 31) & -levels)
    tl.store(codes + place, code.to(tl.int8), mask=here)


@triton.jit
def widen_levels(codes, blocks, scales, values, each, levels, TILE: tl.constexpr):
    """The values of signs and levels."""
    place, here, _size, scale, exists = _row(blocks, each, TILE)
    smallest, largest = _ends(tl.load(scales + scale, mask=exists, other=0))
    code = tl.load(codes + place, mask=here, other=0).to(tl.int32)
    root = (code & (levels - 1)) + 1
    way = tl.div_rn((root * root - 1).to(tl.float32), tl.cast(tl.maximum(levels * levels - 1, 1), tl.float32))
    level = smallest + (largest - smallest) * way
    tl.store(values + place, tl.where(code < 0, -level, level), mask=here)


@triton.jit
def pack_codes(codes, data, count, size, bits, TILE: tl.constexpr):
    """Codes in `bits` each, 8 or fewer, the first one lowest; a program per tile of bytes."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    packed = tl.zeros((TILE,), tl.int32)
    each = 8 // bits
    for field in range(each):
        entry = index * each + field
        code = tl.load(codes + entry, mask=entry < count, other=0).to(tl.int32)
        packed |= (code & ((1 << bits) - 1)) << (field * bits)
    tl.store(data + index, packed.to(tl.uint8), mask=index < size)


@triton.jit
def unpack_codes(data, codes, count, bits, sign, TILE: tl.constexpr):
    """The codes that `pack_codes` packed; `sign` is their highest bit, or 0 if they have none."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = index < count
    each = 8 // bits
    byte = tl.load(data + index // each, mask=here, other=0).to(tl.int32)
    field = (byte >> ((index % each).to(tl.int32) * bits)) & ((1 << bits) - 1)
    tl.store(codes + index, ((field ^ sign) - sign).to(tl.int8), mask=here)


# --- heads of frames, and the verdict on them (wire/format.py) --------------------------------------------------------


@triton.jit
def write_head(frame, head, poisoned, size, flag, TILE: tl.constexpr):
    """The head as it is, with the `flag` that says so if this rank is poisoned."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    byte = tl.load(head + index, mask=index < size, other=0).to(tl.int32)
    byte |= tl.where((index == 1) & (tl.load(poisoned) != 0), flag, 0)
    tl.store(frame + index, byte.to(tl.uint8), mask=index < size)


@triton.jit
def check_places(indices, blocks, ones, lengths, inside, TILE: tl.constexpr):
    """`inside` becomes 0 where indices do not ascend within their block, or leave it, or where the block has not as
    many `ones` as entries."""
    plan = blocks + tl.program_id(1) * 5
    order = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = order < tl.load(plan + 1)
    at = indices + tl.load(plan) + order
    index = tl.load(at, mask=here, other=0)
    previous = tl.load(at - 1, mask=here & (order > 0), other=-1)
    wrong = here & ((index <= previous) | (index >= tl.load(lengths + tl.program_id(1))))
    wrong = wrong | (tl.load(ones + tl.program_id(1)) + order * 0 != tl.load(plan + 1))
    tl.store(inside + tl.zeros_like(order), tl.zeros_like(order).to(tl.int8), mask=wrong)


@triton.jit
def check_scales(scales, fine, count, largest: tl.float32, TILE: tl.constexpr):
    """`fine` becomes 0 where a scale is NaN, or larger than it may be."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    scale = tl.load(scales + index, mask=index < count, other=0.0)
    small = tl.abs(scale) <= largest
    tl.store(fine + tl.zeros_like(index), tl.zeros_like(index).to(tl.int8), mask=small == 0)


@triton.jit
def check_codes(halves, fine, count, stride, pattern, TILE: tl.constexpr):
    """`fine` becomes 0 where all bits of the pattern are set in the last of a code's `stride` halves of 16 bits."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    half = tl.load(halves + index * stride + stride - 1, mask=index < count, other=0).to(tl.int32)
    wrong = (half & pattern) == pattern
    tl.store(fine + tl.zeros_like(index), tl.zeros_like(index).to(tl.int8), mask=wrong & (index < count))


@triton.jit
def judge(frame, head, inside, codes, scales, verdict, room, size, end, whole, flag, refusals, TILE: tl.constexpr):
    """The verdict on a frame in `room` bytes whose head, of `size`, must be this one but for the `flag` of poison.

    It says itself how long it is: `whole` more than `end`, where indices begin. Of what follows the head it is told
    what is fine. What is wrong has numbers in `refusals`, the last of which counts. One program.
    """
    long = tl.zeros((TILE,), tl.int64)
    foreign = tl.zeros((TILE,), tl.int32)
    others = tl.zeros((TILE,), tl.int32)
    poison = tl.zeros((TILE,), tl.int32)
    for first in range(0, size, TILE):
        index = first + tl.arange(0, TILE)
        here = index < size
        found = tl.load(frame + index, mask=here, other=0).to(tl.int32)
        differs = found ^ tl.load(head + index, mask=here, other=0).to(tl.int32)
        length = here & (index >= 4) & (index < 8)
        long += tl.where(length, found.to(tl.int64) << tl.where(length, 8 * (index - 4), 0), 0)
        poison |= tl.where(index == 1, found & flag, 0)
        differs = tl.where(index == 1, differs & (255 - flag), differs)
        foreign |= tl.where(index < 4, differs, 0)
        others |= tl.where(index >= 8, differs, 0)
    total = tl.sum(long, 0)
    found = tl.where(tl.load(scales) == 0, tl.load(refusals), 0)
    found = tl.where((tl.load(inside) == 0) | (total != end + whole), tl.load(refusals + 1), found)
    found = tl.where(tl.load(codes) == 0, tl.load(refusals + 2), found)
    found = tl.where(total < end, tl.load(refusals + 3), found)
    found = tl.where(tl.max(others, 0) != 0, tl.load(refusals + 4), found)
    found = tl.where(tl.max(poison, 0) != 0, tl.load(refusals + 5), found)
    wrong = (tl.max(foreign, 0) != 0) | (total < 8) | (total > room)
    tl.store(verdict, tl.where(wrong, tl.load(refusals + 6), found))


@triton.jit
def clear(data, verdict, size, TILE: tl.constexpr):
    """Bytes of a frame that is refused become zeros; of one that is not, nothing is read or written."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    stop = tl.where(tl.load(verdict) != 0, size, 0)
    tl.store(data + index, tl.zeros_like(index).to(tl.uint8), mask=index < stop)


@triton.jit
def clear_places(indices, blocks, verdict, TILE: tl.constexpr):
    """Indices of a frame that is refused become the first places of their blocks, of which there are two numbers:
    entries before it, and entries."""
    plan = blocks + tl.program_id(1) * 2
    order = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    stop = tl.where(tl.load(verdict) != 0, tl.load(plan + 1), 0)
    tl.store(indices + tl.load(plan) + order, order.to(tl.int32), mask=order < stop)


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
    tl.store(indices + tl.load(plan) + order, tl.minimum(rest + order, 0x7FFFFFFF).to(tl.int32), mask=here)
