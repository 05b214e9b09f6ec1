"""Sparse arithmetic, compiled."""

import numpy as np

from spardl.kernels._numba import compiled, inlined


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
    """Merge the entries that are listed, or reach `low`, into a copy of the list.

    Returns its length, or -1 where it cannot be kept: no room, or indices that do not ascend.
    """
    old = new = 0
    room = new_places.size
    previous = np.int32(-1)
    for i in range(indices.size):
        index = indices[i]
        if index <= previous:
            return -1
        previous = index
        while old < places.size and places[old] < index:
            if new == room:
                return -1
            new_places[new] = places[old]
            new_amounts[new] = amounts[old]
            old += 1
            new += 1
        is_listed = old < places.size and places[old] == index
        old += is_listed
        if is_listed or not abs(totals[i]) < low:
            if new == room:
                return -1
            new_places[new] = index
            new_amounts[new] = totals[i]
            new += 1
    rest = places.size - old
    if new + rest > room:
        return -1
    new_places[new : new + rest] = places[old:]
    new_amounts[new : new + rest] = amounts[old:]
    return new + rest


@compiled(
    "void(float32[::1], int64[::1], int64[::1], int64[::1], int32[::1], float32[::1],"
    " float32[::1], int64[::1], int64[::1], int32[::1], float32[::1])"
)
def scatter_add(acc, ids, firsts, counts, indices, values, lows, edges, fills, places, amounts):
    """Add entries to their blocks; keep the shortlist, in which `ids[b]` is the number of the block."""
    done = 0
    for b in range(firsts.size):
        mine, given = indices[done : done + counts[b]], values[done : done + counts[b]]
        done += counts[b]
        begin, fill = edges[ids[b]], fills[ids[b]]
        room = edges[ids[b] + 1] - begin
        if fill > room:
            _add(acc, firsts[b], mine, given)
            continue
        totals = np.empty(counts[b], np.float32)
        _add_noting(acc, firsts[b], mine, given, totals)
        longest = min(room, fill + counts[b])
        new_places, new_amounts = np.empty(longest, np.int32), np.empty(longest, np.float32)
        listed = slice(begin, begin + fill)
        length = _insert(mine, totals, lows[ids[b]], places[listed], amounts[listed], new_places, new_amounts)
        fills[ids[b]] = length if length >= 0 else room + 1
        for i in range(length):
            places[begin + i] = new_places[i]
            amounts[begin + i] = new_amounts[i]


@compiled("void(float32[::1], int64[::1], int64[::1], int32[::1])")
def clear(memory, firsts, counts, indices):
    """Zero the entries at these places of each block."""
    done = 0
    for b in range(firsts.size):
        for i in range(done, done + counts[b]):
            memory[firsts[b] + indices[i]] = 0.0
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
