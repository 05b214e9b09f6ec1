"""Sparse arithmetic, compiled."""

import numpy as np

from spardl.kernels.cpu.arguments import Lists
from spardl.kernels.cpu.jit import compiled, inlined
from spardl.kernels.cpu.shortlist import INVALID_FILL


@inlined
def _either(condition, one, other):
    """One float32 or the other, without a branch: in a merge, what comes next cannot be guessed."""
    mask = -np.int32(condition)
    kept = (np.float32(one).view(np.int32) & mask) | (np.float32(other).view(np.int32) & ~mask)
    return np.int32(kept).view(np.float32)


@inlined
def _add(acc, first, indices, values):
    for i in range(indices.size):
        acc[first + indices[i]] += values[i]


@inlined
def _add_noting(acc, first, indices, values, totals):
    """Add, and write down the sums. Nothing is decided here, so that many reads of memory are under way at a time."""
    for i in range(indices.size):
        total = acc[first + indices[i]] + values[i]
        acc[first + indices[i]] = total
        totals[i] = total


@inlined
def _insert(indices, totals, low, places, amounts, new_places, new_amounts):
    """Merge the entries that are listed, or reach `low`, into a copy of the list. Both ascend.

    The copy has room for all of both and one more: entries that do not count are overwritten by the next one, which is
    faster than a branch.
    """
    old = i = new = np.int64(0)
    while old < places.size and i < indices.size:
        listed, given = np.int64(places[old] <= indices[i]), np.int64(places[old] >= indices[i])
        new_places[new] = min(places[old], indices[i])
        new_amounts[new] = _either(given, totals[i], amounts[old])
        new += listed | np.int64(not abs(totals[i]) < low)
        old += listed
        i += given
    while i < indices.size:
        new_places[new] = indices[i]
        new_amounts[new] = totals[i]
        new += not abs(totals[i]) < low
        i += 1
    for i in range(old, places.size):
        new_places[new] = places[i]
        new_amounts[new] = amounts[i]
        new += 1
    return new


@inlined
def _ascends(indices):
    fine = True
    for i in range(1, indices.size):
        fine &= indices[i - 1] < indices[i]
    return fine


@inlined
def _add_to_block(acc, first, indices, values, id_, lists):
    """Add entries to a block that begins at `first`, and insert those that count into its list. Entries that do not
    ascend make the list invalid."""
    begin, fill = lists.edges[id_], lists.fills[id_]
    room = lists.edges[id_ + 1] - begin
    if fill > room:
        _add(acc, first, indices, values)
        return
    totals = np.empty(indices.size, np.float32)
    _add_noting(acc, first, indices, values, totals)
    if not _ascends(indices):
        lists.fills[id_] = INVALID_FILL
        return
    longest = fill + indices.size + 1
    new_places, new_amounts = np.empty(longest, np.int32), np.empty(longest, np.float32)
    places, amounts = lists.places[begin : begin + room], lists.amounts[begin : begin + room]
    low = lists.lows.view(np.float32)[id_]
    length = _insert(indices, totals, low, places[:fill], amounts[:fill], new_places, new_amounts)
    lists.fills[id_] = length
    for i in range(min(length, room)):
        places[i] = new_places[i]
        amounts[i] = new_amounts[i]


@compiled(
    "void(float32[::1], int64[::1], int64[::1], int64[::1], int32[::1], float32[::1],"
    " uint32[::1], int64[::1], int64[::1], int32[::1], float32[::1])"
)
def scatter_add(acc, ids, firsts, counts, indices, values, lows, edges, fills, places, amounts):
    """Add entries to their blocks; keep the lists, in which `ids[b]` is the number of the block."""
    lists = Lists(lows, edges, fills, places, amounts)
    done = 0
    for b in range(firsts.size):
        mine, given = indices[done : done + counts[b]], values[done : done + counts[b]]
        done += counts[b]
        _add_to_block(acc, firsts[b], mine, given, ids[b], lists)


@compiled("void(float32[::1], int64[::1], int64[::1], int32[::1], float32[::1], float32)")
def fade(memory, firsts, counts, indices, values, share):
    """Multiply entries by share * |entry| / |value|, if that is less than one."""
    done = 0
    for b in range(firsts.size):
        for i in range(done, done + counts[b]):
            entry = memory[firsts[b] + indices[i]]
            most, value = share * abs(entry), abs(values[i])
            memory[firsts[b] + indices[i]] = entry * (most / value) if most < value else entry
        done += counts[b]


@compiled("int64(int32[::1], float32[::1], int32[::1], float32[::1], int32[::1], float32[::1])")
def merge(left, left_values, right, right_values, indices, values):
    """Sum of two sorted sparse vectors; entries that cancel to zero vanish. The outputs need room for one more."""
    nothing = np.float32(0.0)
    i = j = done = np.int64(0)
    while i < left.size and j < right.size:
        from_left, from_right = np.int64(left[i] <= right[j]), np.int64(left[i] >= right[j])
        indices[done] = min(left[i], right[j])
        value = _either(from_left, left_values[i], nothing) + _either(from_right, right_values[j], nothing)
        values[done] = value
        done += value != 0.0
        i += from_left
        j += from_right
    while i < left.size:
        indices[done] = left[i]
        values[done] = left_values[i]
        done += left_values[i] != 0.0
        i += 1
    while j < right.size:
        indices[done] = right[j]
        values[done] = right_values[j]
        done += right_values[j] != 0.0
        j += 1
    return done
