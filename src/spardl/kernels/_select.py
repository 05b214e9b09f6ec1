"""Selection, compiled: the largest of each block, exactly, and what lies above a threshold."""

import numpy as np

from spardl.kernels._lanes import LANES, at_least, lowest_bit
from spardl.kernels._numba import INFINITE, MAGNITUDE, compiled, inlined
from spardl.kernels._values import nearest_bf16
from spardl.kernels.shortlist import MEANT, ROOM

NEVER = np.uint64(1 << 32)
BINS = 2048
USED = np.int64(1 << 62)  # as the length of a list: longer than any room
SPARE = 5  # quarters of a budget that the next step's list should hold
STEP = np.uint32(1 << 20)  # down to the key of about nine tenths


@compiled("boolean(uint32[::1])")
def all_finite(bits):
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & MAGNITUDE)
    return largest < INFINITE


@inlined
def _count_bins(bits, low, high, shift, histogram):
    """Histogram of (key >> shift) for keys in [low, high); four tables, so that equal neighbours do not wait."""
    for row in range(4):
        for bin_ in range(BINS):
            histogram[row, bin_] = 0
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


@inlined
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


@inlined
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


@inlined
def _count_between(keys, low, high):
    found = 0
    for i in range(keys.size):
        key = keys[i] & MAGNITUDE
        found += (key >= low) & (key < high)
    return found


@inlined
def _inside(bits, low, held):
    """The keys of the first histogram's bin at `low`, of which there are `held`."""
    keys = np.empty(held + 1, np.uint32)
    top = low + (np.uint64(1) << np.uint64(20))
    found = 0
    for i in range(bits.size):
        key = bits[i] & MAGNITUDE
        keys[found] = key  # also those outside, which the next one overwrites: without a branch it is faster
        found += low <= key < top
    return keys[:held]


@inlined
def cut(bits, budget, histogram):
    """The key of the `budget`-th largest magnitude, and how many entries of exactly that key are to be kept."""
    if budget <= 0:
        return NEVER, 0
    if budget >= bits.size:
        return np.uint64(1), bits.size
    low, wanted, held = _refine(bits, np.uint64(0), budget, np.uint32(20), BINS, histogram)
    return _settle(_inside(bits, low, held), low, wanted, held, histogram)


@inlined
def _lower_key(histogram, wanted):
    """The key down to which there are about `wanted` keys, by the first histogram, whose bins count as even inside."""
    for bin_ in range(BINS - 1, 0, -1):
        held = histogram[0, bin_] + histogram[1, bin_] + histogram[2, bin_] + histogram[3, bin_]
        if held >= wanted:
            return np.uint32(((bin_ + 1) << 20) - (wanted << 20) // held)
        wanted -= held
    return INFINITE


@inlined
def _sweep(bits, low, places):
    """Write down where keys are at least `low`; there must be room for all of them."""
    found = 0
    whole = bits.size // LANES * LANES
    for tile in range(0, whole, LANES):
        word = at_least(bits, tile, low)
        while word:
            places[found] = tile + lowest_bit(word)
            word &= word - np.uint64(1)
            found += 1
    for i in range(whole, bits.size):
        if (bits[i] & MAGNITUDE) >= low:
            places[found] = i
            found += 1
    return found


@inlined
def _cut_block(bits, budget, histogram, candidates):
    """`cut`, finished on the few candidates above the first bin instead of on the whole block where they fit.

    Returns also how many candidates there are, or -1 where the whole block has to be looked at, and the key from which
    the next step should list.
    """
    if budget >= bits.size:
        threshold, ties = cut(bits, budget, histogram)
        return threshold, ties, -1, INFINITE
    low, wanted, held = _refine(bits, np.uint64(0), budget, np.uint32(20), BINS, histogram)
    next_low = _lower_key(histogram, SPARE * budget // 4)
    if low == 0 or budget - wanted + held > candidates.size:
        threshold, ties = _settle(bits, low, wanted, held, histogram)
        return threshold, ties, -1, next_low
    found = _sweep(bits, np.uint32(low), candidates)
    keys = np.empty(found, np.uint32)
    for i in range(found):
        keys[i] = bits[candidates[i]]
    threshold, ties = _settle(_inside(keys, low, held), low, wanted, held, histogram)
    return threshold, ties, found, next_low


@inlined
def _cut_listed(bits, budget, low, histogram):
    """`cut` among the listed entries of a block, more than the budget. Exact if it comes out as `low` or more.

    Returns also the key from which the next step should list.
    """
    first, wanted, held = _refine(bits, np.uint64(0), budget, np.uint32(20), BINS, histogram)
    next_low = low - STEP if low > STEP else INFINITE
    if SPARE * budget // 4 <= bits.size:
        next_low = _lower_key(histogram, SPARE * budget // 4)
    threshold, ties = _settle(_inside(bits, first, held), first, wanted, held, histogram)
    return threshold, ties, next_low


@inlined
def _choose(bits, threshold, ties, places, amounts, indices, values, done):
    """Append the entries whose key, in `bits`, reaches the threshold, and so many of those that equal it."""
    for i in range(bits.size):
        key = bits[i] & MAGNITUDE
        equal = np.int64(key == threshold) & np.int64(ties > 0)
        ties -= equal
        indices[done] = places[i]
        values[done] = amounts[i]
        done += np.int64(key > threshold) | equal
    return done


@inlined
def _choose_anywhere(bits, threshold, ties, amounts, indices, values, done):
    """The same for a whole block."""
    for i in range(bits.size):
        key = bits[i] & MAGNITUDE
        if key >= threshold:
            equal = key == threshold
            if equal and ties == 0:
                continue
            ties -= equal
            indices[done] = i
            values[done] = amounts[i]
            done += 1
    return done


@inlined
def _leave(acc, first, indices, values, bits, codes):
    """Take entries out of a block: leave zero, or if there is room for `codes`, write the nearest bf16 there and leave
    the rest. Returns whether what was rounded is finite."""
    largest = np.uint32(0)
    if not codes.size:
        for i in range(indices.size):
            acc[first + indices[i]] = 0.0
        return True
    for i in range(indices.size):
        near = nearest_bf16(bits[i])
        largest = max(largest, bits[i] & MAGNITUDE)
        codes[i] = np.uint16(near >> np.uint32(16))
        acc[first + indices[i]] = values[i] - np.uint32(near).view(np.float32)
    return largest < INFINITE


@compiled(
    "Tuple((int64, boolean))(float32[::1], uint32[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int32[::1], float32[::1], uint32[::1], uint16[::1], uint32[::1], int64[::1], int64[::1], int32[::1],"
    " float32[::1], uint32[::1], uint32[::1], int64[::1])"
)
def take_largest(
    acc, bits, ids, firsts, stops, budgets, counts, indices, values, value_bits, codes,
    lows, edges, fills, places, amounts, amount_bits, next_lows, wanted,
):  # fmt: skip
    """Move the `budgets[b]` largest entries of each block [firsts[b], stops[b]) out of acc.

    `ids[b]` is the block's number in the shortlist, whose next keys and rooms are noted. A list serves once.
    The outputs need room for one entry more than can be taken. If there is room for codes, only the nearest bf16 of
    each entry is moved, to there. Returns how many were moved, and whether the codes are finite.
    """
    finite = True
    histogram = np.empty((4, BINS), np.int32)
    room = 0
    for b in range(ids.size):
        room = max(room, min(2 * budgets[b] + 64, stops[b] - firsts[b]))
    candidates = np.empty(room, np.int32)
    done = 0
    for b in range(ids.size):
        id_, budget, first = ids[b], budgets[b], firsts[b]
        if budget <= 0:
            counts[b] = 0
            continue
        block, block_bits = acc[first : stops[b]], bits[first : stops[b]]
        before = done
        begin, found = edges[id_], fills[id_]
        usable = budget < found <= edges[id_ + 1] - begin
        if usable:
            listed, held, keys = places[begin:], amounts[begin:], amount_bits[begin : begin + found]
            threshold, ties, next_low = _cut_listed(keys, budget, lows[id_], histogram)
            usable = threshold >= lows[id_]
            if usable:
                done = _choose(keys, threshold, ties, listed, held, indices, values, done)
        if not usable:
            threshold, ties, found, next_low = _cut_block(block_bits, budget, histogram, candidates)
            if found < 0:
                done = _choose_anywhere(block_bits, threshold, ties, block, indices, values, done)
            else:
                held = np.empty(found, np.float32)
                for i in range(found):
                    held[i] = block[candidates[i]]
                done = _choose(held.view(np.uint32), threshold, ties, candidates, held, indices, values, done)
        finite &= _leave(acc, first, indices[before:done], values[before:done], value_bits[before:done], codes[before:])
        counts[b] = done - before
        fills[id_] = USED
        if MEANT * budget < stops[b] - first:
            next_lows[id_] = min(next_lows[id_], next_low)
            wanted[id_] = max(wanted[id_], ROOM * budget + 64)
    return done, finite


@compiled("int64(int64[::1], int64[::1], int64[::1])")
def room_for(firsts, stops, budgets):
    """How many entries `take_largest` can take."""
    room = 0
    for b in range(budgets.size):
        room += max(0, min(budgets[b], stops[b] - firsts[b]))
    return room


@compiled("int64(float32[::1], uint32[::1], int64, int64, uint32, int32[::1], float32[::1])")
def take_above(acc, bits, first, stop, threshold, indices, values):
    """Move entries of [first, stop) whose key is at least `threshold` out of acc, until the output is full."""
    done = 0
    whole = first + (stop - first) // LANES * LANES
    for tile in range(first, whole, LANES):
        found = at_least(bits, tile, threshold)
        while found:
            if done == indices.size:
                return done
            place = tile + lowest_bit(found)
            found &= found - np.uint64(1)
            indices[done] = place - first
            values[done] = acc[place]
            acc[place] = 0.0
            done += 1
    for place in range(whole, stop):
        if (bits[place] & MAGNITUDE) >= threshold:
            if done == indices.size:
                return done
            indices[done] = place - first
            values[done] = acc[place]
            acc[place] = 0.0
            done += 1
    return done


@compiled("int64(float32[::1], int64, int64, uint32, int32[::1], float32[::1], uint32[::1], int32[::1], float32[::1])")
def take_listed(acc, first, stop, threshold, places, amounts, amount_bits, indices, values):
    """`take_above`, among the listed entries alone."""
    done = 0
    for i in range(np.searchsorted(places, first), np.searchsorted(places, stop)):
        if (amount_bits[i] & MAGNITUDE) >= threshold:
            if done == indices.size:
                return done
            indices[done] = places[i] - first
            values[done] = amounts[i]
            acc[places[i]] = 0.0
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
    for bin_ in range(counts.size):
        counts[bin_] = 0
    last = counts.size - 1
    for i in range(bits.size):
        bin_ = (np.int64(bits[i] & MAGNITUDE) >> shift) - first
        if bin_ >= 0:
            counts[min(bin_, last)] += 1


@compiled("int64(int32[::1], float32[::1], uint32[::1], int64, int32[::1], float32[::1], int32[::1], float32[::1])")
def part_largest(indices, values, bits, budget, kept, kept_values, others, other_values):
    """Copy the `budget` largest entries of a list to one place and the others to another; zeros are never kept.

    Returns how many were kept. There must be more entries than the budget; the outputs need room for one more.
    """
    histogram = np.empty((4, BINS), np.int32)
    threshold, ties = cut(bits, budget, histogram)
    done = rest = 0
    for i in range(indices.size):
        key = bits[i] & MAGNITUDE
        equal = key == threshold and ties > 0
        ties -= equal
        keep = key > threshold or equal
        kept[done] = others[rest] = indices[i]
        kept_values[done] = other_values[rest] = values[i]
        done += keep
        rest += not keep
    return done


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
