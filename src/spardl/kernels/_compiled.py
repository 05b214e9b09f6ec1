"""The hot loops, compiled for CPU by numba. `compiled.py` gives them the signatures that the rest of the code sees.

Magnitudes are compared as integers: a float32 without its sign bit, read as uint32, orders like its absolute value.
Every loop that is called from outside has exactly one type signature, so that it is compiled and cached on import.
"""

import numpy as np
from numba import njit

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
NEVER = np.uint64(1 << 32)
BINS = 2048

_fast = njit(cache=True, nogil=True, boundscheck=False)


def compiled(signature):
    return njit(signature, cache=True, nogil=True, boundscheck=False)


# --- looking at a gradient ---------------------------------------------------------------------------------------


@compiled("boolean(uint32[::1])")
def all_finite(bits):
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & MAGNITUDE)
    return largest < INFINITE


# --- between tensors (natural order) and the accumulator (block order) -------------------------------------------
# Chunk c of the natural order lies in block c % count, at slot c // count. See blocks.py.


@_fast
def _run(position, stop, starts, count, chunk):
    """Where the run at natural `position` lies in block order, and how long it is."""
    piece = position // chunk
    offset = position - piece * chunk
    place = starts[piece % count] + (piece // count) * chunk + offset
    return place, min(chunk - offset, stop - position)


@compiled("void(float32[::1], int64[::1], int64, int64, float32[::1], float32)")
def accumulate(acc, starts, chunk, offset, gradient, scale):
    """acc += scale * gradient; gradient becomes what acc was before."""
    count = starts.size - 1
    i = 0
    while i < gradient.size:
        place, length = _run(offset + i, offset + gradient.size, starts, count, chunk)
        old, new = acc[place : place + length], gradient[i : i + length]
        for j in range(length):
            before = old[j]
            old[j] = before + new[j] * scale
            new[j] = before
        i += length


@compiled(
    "void(float32[::1], float32[::1], float32[::1], int64[::1], int64, int64, float32[::1], float32[::1],"
    " float32, float32, float32, float32, boolean)"
)
def accumulate_momentum(
    acc, velocity, updated, starts, chunk, offset, gradient, weights, scale, momentum, decay, damping, nesterov
):
    """Momentum SGD's direction instead of the plain gradient; `updated` receives the new velocity."""
    count = starts.size - 1
    i = 0
    while i < gradient.size:
        place, length = _run(offset + i, offset + gradient.size, starts, count, chunk)
        old, new, weight = acc[place : place + length], gradient[i : i + length], weights[i : i + length]
        slow, fast = velocity[place : place + length], updated[place : place + length]
        for j in range(length):
            fresh = new[j] * scale + decay * weight[j]
            speed = momentum * slow[j] + damping * fresh
            before = old[j]
            old[j] = before + (fresh + momentum * speed if nesterov else speed)
            fast[j] = speed
            new[j] = before
        i += length


@compiled("void(float32[::1], int64[::1], int64, int64, float32[::1])")
def read(acc, starts, chunk, offset, out):
    count = starts.size - 1
    i = 0
    while i < out.size:
        place, length = _run(offset + i, offset + out.size, starts, count, chunk)
        out[i : i + length] = acc[place : place + length]
        i += length


@compiled("void(float32[::1], int64[::1], int64, int64, float32[::1])")
def write(acc, starts, chunk, offset, source):
    count = starts.size - 1
    i = 0
    while i < source.size:
        place, length = _run(offset + i, offset + source.size, starts, count, chunk)
        acc[place : place + length] = source[i : i + length]
        i += length


@compiled("void(int64[::1], int64, int64[::1], int32[::1], float32[::1], int64[::1], float32[::1])")
def to_natural_order(starts, chunk, counts, indices, values, positions, ordered):
    """Entries of all blocks, sorted by natural position: one walk over the chunks, a cursor in each block."""
    count = starts.size - 1
    cursors = np.zeros(count, np.int64)
    for block in range(1, count):
        cursors[block] = cursors[block - 1] + counts[block - 1]
    stops = cursors + counts
    length = starts[count]
    done = 0
    piece = 0
    while done < indices.size and piece * chunk < length:
        block = piece % count
        slot = piece // count
        cursor = cursors[block]
        limit = (slot + 1) * chunk
        while cursor < stops[block] and indices[cursor] < limit:
            positions[done] = piece * chunk + indices[cursor] - slot * chunk
            ordered[done] = values[cursor]
            done += 1
            cursor += 1
        cursors[block] = cursor
        piece += 1


# --- selection ---------------------------------------------------------------------------------------------------


@_fast
def _count_bins(bits, low, high, shift, histogram):
    """Histogram of (key >> shift) for keys in [low, high); four tables, so that equal neighbours do not wait."""
    histogram[:] = 0
    base = low >> shift
    whole = bits.size // 4 * 4
    if low == 0 and high > MAGNITUDE:
        for i in range(0, whole, 4):
            histogram[0, (bits[i] & MAGNITUDE) >> shift] += 1
            histogram[1, (bits[i + 1] & MAGNITUDE) >> shift] += 1
            histogram[2, (bits[i + 2] & MAGNITUDE) >> shift] += 1
            histogram[3, (bits[i + 3] & MAGNITUDE) >> shift] += 1
        for i in range(whole, bits.size):
            histogram[0, (bits[i] & MAGNITUDE) >> shift] += 1
    else:
        for i in range(bits.size):
            key = bits[i] & MAGNITUDE
            if low <= key < high:
                histogram[0, (key >> shift) - base] += 1


@_fast
def _refine(bits, low, wanted, shift, width, histogram):
    """The bin, among `width` bins of keys from `low` up, that holds the `wanted`-th largest key.

    Returns its lowest key, how many keys of it are wanted, and how many it holds.
    """
    _count_bins(bits, low, low + (np.uint32(width) << shift), shift, histogram)
    bin_ = width - 1
    while True:
        held = histogram[0, bin_] + histogram[1, bin_] + histogram[2, bin_] + histogram[3, bin_]
        if held >= wanted or bin_ == 0:
            return low + (np.uint32(bin_) << shift), wanted, held
        wanted -= held
        bin_ -= 1


@_fast
def _settle(keys, low, wanted, held, histogram):
    """The key where the `wanted` largest keys of the first histogram's bin at `low` end, and how many of it to keep.

    Two more histograms, of 11 and 9 bits, settle any input. Zeros are never kept: the smallest threshold is 1.
    """
    if low == 0 and _count_between(keys, np.uint32(1), np.uint32(1) << np.uint32(20)) <= wanted:
        return np.uint64(1), keys.size
    if held > wanted:
        low, wanted, held = _refine(keys, low, wanted, np.uint32(9), BINS, histogram)
    if held > wanted:
        low, wanted, held = _refine(keys, low, wanted, np.uint32(0), 512, histogram)
    if low == 0:
        return np.uint64(1), keys.size
    return low, wanted


@_fast
def _count_between(keys, low, high):
    found = 0
    for i in range(keys.size):
        key = keys[i] & MAGNITUDE
        found += (key >= low) & (key < high)
    return found


@_fast
def cut(bits, budget, histogram):
    """The key of the `budget`-th largest magnitude, and how many entries of exactly that key are to be kept."""
    if budget <= 0:
        return NEVER, 0
    if budget >= bits.size:
        return np.uint64(1), bits.size
    low, wanted, held = _refine(bits, np.uint64(0), budget, np.uint32(20), BINS, histogram)
    return _settle(bits, low, wanted, held, histogram)


@_fast
def _cut_block(bits, budget, histogram, candidates):
    """`cut`, finished on the few candidates above the first bin instead of on the whole block where they fit.

    Returns also how many candidates there are, or -1 where the whole block has to be looked at.
    """
    if budget <= 0 or budget >= bits.size:
        threshold, ties = cut(bits, budget, histogram)
        return threshold, ties, -1
    low, wanted, held = _refine(bits, np.uint64(0), budget, np.uint32(20), BINS, histogram)
    if low == 0 or budget - wanted + held > candidates.size:
        threshold, ties = _settle(bits, low, wanted, held, histogram)
        return threshold, ties, -1
    found = 0
    for i in range(bits.size):
        if (bits[i] & MAGNITUDE) >= low:
            candidates[found] = i
            found += 1
    keys = np.empty(held, np.uint32)
    inside = 0
    top = low + (np.uint64(1) << np.uint64(20))
    for i in range(found):
        key = bits[candidates[i]] & MAGNITUDE
        if key < top:
            keys[inside] = key
            inside += 1
    threshold, ties = _settle(keys, low, wanted, held, histogram)
    return threshold, ties, found


@compiled("void(float32[::1], uint32[::1], int64[::1], int64[::1], int64[::1], int64[::1], int32[::1], float32[::1])")
def take_largest(acc, bits, firsts, stops, budgets, counts, indices, values):
    """Move the `budgets[b]` largest entries of each block [firsts[b], stops[b]) out of acc."""
    histogram = np.empty((4, BINS), np.int32)
    room = 0
    for b in range(firsts.size):
        room = max(room, min(2 * budgets[b] + 64, stops[b] - firsts[b]))
    candidates = np.empty(room, np.int32)
    done = 0
    for b in range(firsts.size):
        first = firsts[b]
        block = bits[first : stops[b]]
        threshold, ties, found = _cut_block(block, budgets[b], histogram, candidates)
        before = done
        steps = block.size if found < 0 else found
        if budgets[b] <= 0:
            steps = 0
        for step in range(steps):
            i = step if found < 0 else np.int64(candidates[step])
            key = block[i] & MAGNITUDE
            if key < threshold:
                continue
            if key == threshold:
                if ties == 0:
                    continue
                ties -= 1
            indices[done] = i
            values[done] = acc[first + i]
            acc[first + i] = 0.0
            done += 1
        counts[b] = done - before


@compiled("int64(float32[::1], uint32[::1], int64, int64, uint32, int32[::1], float32[::1])")
def take_above(acc, bits, first, stop, threshold, indices, values):
    """Move entries of [first, stop) whose key is at least `threshold` out of acc, until the output is full."""
    block, keys = acc[first:stop], bits[first:stop]
    done = 0
    for i in range(keys.size):
        if (keys[i] & MAGNITUDE) >= threshold:
            if done == indices.size:
                break
            indices[done] = i
            values[done] = block[i]
            block[i] = 0.0
            done += 1
    return done


@compiled("int64(uint32[::1], uint32)")
def count_above(bits, threshold):
    found = 0
    for i in range(bits.size):
        found += (bits[i] & MAGNITUDE) >= threshold
    return found


@compiled("void(uint32[::1], int64, int64, int64[::1])")
def count_bins(bits, first, shift, counts):
    """Histogram of keys by leading bits; above the last bin counts in it, below the first one nowhere."""
    counts[:] = 0
    last = counts.size - 1
    for i in range(bits.size):
        bin_ = (np.int64(bits[i] & MAGNITUDE) >> shift) - first
        if bin_ >= 0:
            counts[min(bin_, last)] += 1


@compiled("int64(uint32[::1], int64, boolean[::1])")
def keep_largest(bits, budget, keep):
    """Mark the `budget` largest of a short list; ties go to the first. Returns how many were marked."""
    histogram = np.empty((4, BINS), np.int32)
    threshold, ties = cut(bits, budget, histogram)
    kept = 0
    for i in range(bits.size):
        key = bits[i] & MAGNITUDE
        keep[i] = False
        if budget > 0 and key >= threshold:
            if key == threshold:
                if ties == 0:
                    continue
                ties -= 1
            keep[i] = True
            kept += 1
    return kept


# --- sparse arithmetic -------------------------------------------------------------------------------------------


@compiled("void(float32[::1], int64[::1], int64[::1], int32[::1], float32[::1])")
def scatter_add(acc, firsts, counts, indices, values):
    done = 0
    for b in range(firsts.size):
        first = firsts[b]
        for i in range(done, done + counts[b]):
            acc[first + indices[i]] += values[i]
        done += counts[b]


@compiled("int64(int32[::1], float32[::1], int32[::1], float32[::1], int32[::1], float32[::1])")
def merge(left, left_values, right, right_values, indices, values):
    """Sum of two sorted sparse vectors; entries that cancel to zero vanish."""
    i = j = done = 0
    while i < left.size or j < right.size:
        if j == right.size or (i < left.size and left[i] < right[j]):
            indices[done] = left[i]
            values[done] = left_values[i]
            i += 1
        elif i == left.size or right[j] < left[i]:
            indices[done] = right[j]
            values[done] = right_values[j]
            j += 1
        else:
            indices[done] = left[i]
            values[done] = left_values[i] + right_values[j]
            i += 1
            j += 1
        if values[done] != 0.0:
            done += 1
    return done
