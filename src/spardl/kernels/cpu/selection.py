"""Selection, compiled: the largest of each block, exactly, and what lies above a threshold.

The last wanted key is found by up to three histograms of its bits: the first 11, the next 11, the last 9.
"""

import numpy as np

from spardl.kernels.cpu.arguments import Blocks, Lists, NextLists, Taken
from spardl.kernels.cpu.bf16 import nearest_bf16
from spardl.kernels.cpu.intrinsics import LANES, at_least, lowest_bit
from spardl.kernels.cpu.jit import INFINITE_KEY, MAGNITUDE, compiled, inlined
from spardl.kernels.cpu.shortlist import INVALID_FILL, LIST_ROOM, MIN_ELEMENTS_PER_ENTRY, SPARE_ROOM

UNREACHABLE_KEY = np.uint64(1 << 32)  # larger than that of any magnitude
BINS = 2048
FIRST_SHIFT = np.uint32(20)  # bits of a key below those of the first histogram
SECOND_SHIFT = np.uint32(9)
LAST_BINS = 1 << 9
CANDIDATE_ROOM = 2  # candidates per entry of the budget: a block is swept for no more
LISTED_QUARTERS = 5  # quarters of a budget that the next step's list should hold
LIST_EXTENSION = np.uint32(1 << 20)  # keys between the low of a list that was too short and about nine tenths of it


@compiled("boolean(uint32[::1])")
def all_finite(bits):
    """Whether no magnitude is infinite or NaN."""
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & MAGNITUDE)
    return largest < INFINITE_KEY


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

    Two more histograms settle any input. Zeros are never kept: the smallest threshold is 1.
    """
    if low == 0 and _count_between(keys, np.uint32(1), np.uint32(1) << FIRST_SHIFT) <= wanted:
        return np.uint64(1), keys.size
    if held > wanted:
        low, wanted, held = _refine(keys, low, wanted, SECOND_SHIFT, BINS, histogram)
    if held > wanted:
        low, wanted, held = _refine(keys, low, wanted, np.uint32(0), LAST_BINS, histogram)
    if low == 0:
        return np.uint64(1), keys.size
    return low, wanted


@inlined
def _count_between(keys, low, high):
    """How many keys lie in [low, high)."""
    found = 0
    for i in range(keys.size):
        key = keys[i] & MAGNITUDE
        found += (key >= low) & (key < high)
    return found


@inlined
def _inside(bits, low, held):
    """The keys of the first histogram's bin at `low`, of which there are `held`."""
    keys = np.empty(held + 1, np.uint32)
    top = low + (np.uint64(1) << np.uint64(FIRST_SHIFT))
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
        return UNREACHABLE_KEY, 0
    if budget >= bits.size:
        return np.uint64(1), bits.size
    low, wanted, held = _refine(bits, np.uint64(0), budget, FIRST_SHIFT, BINS, histogram)
    return _settle(_inside(bits, low, held), low, wanted, held, histogram)


@inlined
def _lower_key(histogram, wanted):
    """The key down to which there are about `wanted` keys, by the first histogram, whose bins count as even inside."""
    for bin_ in range(BINS - 1, 0, -1):
        held = histogram[0, bin_] + histogram[1, bin_] + histogram[2, bin_] + histogram[3, bin_]
        if held >= wanted:
            return np.uint32(((bin_ + 1) << np.int64(FIRST_SHIFT)) - (wanted << np.int64(FIRST_SHIFT)) // held)
        wanted -= held
    return INFINITE_KEY


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
    """The key of a block's `budget`-th largest magnitude, and how many entries of exactly that key are to be kept. The
    last histograms look only at the candidates in or above the first one's bin, where there is room for them.

    Returns also how many candidates there are, or -1 where the whole block has to be looked at, and the key from which
    the next step should list.
    """
    if budget >= bits.size:
        threshold, ties = cut(bits, budget, histogram)
        return threshold, ties, -1, INFINITE_KEY
    low, wanted, held = _refine(bits, np.uint64(0), budget, FIRST_SHIFT, BINS, histogram)
    next_low = _lower_key(histogram, LISTED_QUARTERS * budget // 4)
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
    """The key of the `budget`-th largest magnitude among a block's listed entries, of which there are more, and how
    many entries of exactly that key are to be kept. They hold for the whole block if the key is `low` or more.

    Returns also the key from which the next step should list.
    """
    first, wanted, held = _refine(bits, np.uint64(0), budget, FIRST_SHIFT, BINS, histogram)
    next_low = low - LIST_EXTENSION if low > LIST_EXTENSION else INFINITE_KEY
    if LISTED_QUARTERS * budget // 4 <= bits.size:
        next_low = _lower_key(histogram, LISTED_QUARTERS * budget // 4)
    threshold, ties = _settle(_inside(bits, first, held), first, wanted, held, histogram)
    return threshold, ties, next_low


@inlined
def _choose(bits, threshold, ties, places, amounts, indices, values, done):
    """Append the entries whose key, in `bits`, is above the threshold, and the first `ties` of those that equal it."""
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
    """Append the entries of a whole block whose key is above the threshold, and the first `ties` of those that equal
    it."""
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
def _select_listed(id_, budget, lists, taken, done, histogram):
    """Append the `budget` largest entries of a block, if its list suffices to find them.

    Returns where the next entry goes, or -1 if the list does not suffice, and the key from which the next step should
    list.
    """
    begin, low, found = lists.edges[id_], lists.lows[id_], lists.fills[id_]
    if not budget < found <= lists.edges[id_ + 1] - begin:
        return np.int64(-1), INFINITE_KEY
    places, amounts = lists.places[begin : begin + found], lists.amounts[begin : begin + found]
    bits = amounts.view(np.uint32)
    threshold, ties, next_low = _cut_listed(bits, budget, low, histogram)
    if threshold < low:
        return np.int64(-1), INFINITE_KEY
    return _choose(bits, threshold, ties, places, amounts, taken.indices, taken.values, done), next_low


@inlined
def _select_anywhere(block, budget, taken, done, histogram, candidates):
    """Append the `budget` largest entries of a block, all of which is looked at.

    Returns where the next entry goes, and the key from which the next step should list.
    """
    bits = block.view(np.uint32)
    threshold, ties, found, next_low = _cut_block(bits, budget, histogram, candidates)
    if found < 0:
        return _choose_anywhere(bits, threshold, ties, block, taken.indices, taken.values, done), next_low
    amounts = np.empty(found, np.float32)
    for i in range(found):
        amounts[i] = block[candidates[i]]
    keys = amounts.view(np.uint32)
    return _choose(keys, threshold, ties, candidates, amounts, taken.indices, taken.values, done), next_low


@inlined
def _leave(acc, first, indices, values, codes):
    """Take entries out of a block: leave zero, or if there is room for `codes`, write the nearest bf16 there and leave
    the rest. Returns whether what was rounded is finite."""
    if not codes.size:
        for i in range(indices.size):
            acc[first + indices[i]] = 0.0
        return True
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(indices.size):
        near = nearest_bf16(bits[i])
        largest = max(largest, bits[i] & MAGNITUDE)
        codes[i] = np.uint16(near >> np.uint32(16))
        acc[first + indices[i]] = values[i] - np.uint32(near).view(np.float32)
    return largest < INFINITE_KEY


@inlined
def _room_for_candidates(blocks):
    """How many candidates any of the blocks may have."""
    room = 0
    for b in range(blocks.ids.size):
        wanted = CANDIDATE_ROOM * blocks.budgets[b] + SPARE_ROOM
        room = max(room, min(wanted, blocks.stops[b] - blocks.firsts[b]))
    return room


@inlined
def _take_largest(acc, blocks, taken, lists, next_lists):
    """What `take_largest` does, with arguments that belong together put together."""
    finite = True
    histogram = np.empty((4, BINS), np.int32)
    candidates = np.empty(_room_for_candidates(blocks), np.int32)
    done = np.int64(0)
    for b in range(blocks.ids.size):
        id_, budget, first, stop = blocks.ids[b], blocks.budgets[b], blocks.firsts[b], blocks.stops[b]
        if budget <= 0:
            taken.counts[b] = 0
            continue
        end, next_low = _select_listed(id_, budget, lists, taken, done, histogram)
        if end < 0:
            end, next_low = _select_anywhere(acc[first:stop], budget, taken, done, histogram, candidates)
        finite &= _leave(acc, first, taken.indices[done:end], taken.values[done:end], taken.codes[done:])
        taken.counts[b] = end - done
        done = end
        lists.fills[id_] = INVALID_FILL
        if MIN_ELEMENTS_PER_ENTRY * budget < stop - first:
            next_lists.lows[id_] = min(next_lists.lows[id_], next_low)
            next_lists.rooms[id_] = max(next_lists.rooms[id_], LIST_ROOM * budget + SPARE_ROOM)
    return done, finite


@compiled(
    "Tuple((int64, boolean))(float32[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int32[::1], float32[::1], uint16[::1],"
    " uint32[::1], int64[::1], int64[::1], int32[::1], float32[::1], uint32[::1], int64[::1])"
)
def take_largest(
    acc, ids, firsts, stops, budgets, counts, indices, values, codes,
    lows, edges, fills, places, amounts, next_lows, rooms,
):  # fmt: skip
    """Move the `budgets[b]` largest entries of each block [firsts[b], stops[b]) out of acc; note what the next step
    should list. A list serves once.

    If there is room for codes, only the nearest bf16 of each entry is moved, to there. Returns how many were moved, and
    whether the codes are finite.
    """
    blocks, taken = Blocks(ids, firsts, stops, budgets), Taken(counts, indices, values, codes)
    lists, next_lists = Lists(lows, edges, fills, places, amounts), NextLists(next_lows, rooms)
    return _take_largest(acc, blocks, taken, lists, next_lists)


@compiled("int64(int64[::1], int64[::1], int64[::1])")
def room_for(firsts, stops, budgets):
    """How many entries `take_largest` can take."""
    room = 0
    for b in range(budgets.size):
        room += max(0, min(budgets[b], stops[b] - firsts[b]))
    return room


@compiled("int64(float32[::1], int64, int64, uint32, int32[::1], float32[::1])")
def take_above(acc, first, stop, threshold, indices, values):
    """Move entries of [first, stop) whose key is at least `threshold` out of acc, until the output is full."""
    bits = acc.view(np.uint32)
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


@compiled("int64(float32[::1], int64, int64, uint32, int32[::1], float32[::1], int32[::1], float32[::1])")
def take_listed(acc, first, stop, threshold, places, amounts, indices, values):
    """Move entries of [first, stop) whose key is at least `threshold`, all of which are listed, out of acc, until the
    output is full."""
    bits = amounts.view(np.uint32)
    done = 0
    for i in range(np.searchsorted(places, first), np.searchsorted(places, stop)):
        if (bits[i] & MAGNITUDE) >= threshold:
            if done == indices.size:
                return done
            indices[done] = places[i] - first
            values[done] = amounts[i]
            acc[places[i]] = 0.0
            done += 1
    return done


@compiled("int64(uint32[::1], uint32)")
def count_above(bits, threshold):
    """How many keys are at least `threshold`."""
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


@compiled("int64(int32[::1], float32[::1], int64, int32[::1], float32[::1], int32[::1], float32[::1])")
def part_largest(indices, values, budget, kept, kept_values, others, other_values):
    """Copy the `budget` largest entries of a list to one place and the others to another; zeros are never kept.

    Returns how many were kept. There must be more entries than the budget; the outputs need room for one more.
    """
    bits = values.view(np.uint32)
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
