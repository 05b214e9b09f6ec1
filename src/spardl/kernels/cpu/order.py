"""Loops between tensors (natural order) and the accumulator (block order), compiled.

Chunk c of the natural order lies in block c % count, at slot c // count. See memory/layout.py.
"""

import numpy as np

from spardl.kernels.cpu.arguments import BlockList, Lists, Rule, Stretch
from spardl.kernels.cpu.intrinsics import LANES, ask_for, at_least, count_bits, lowest_bit, stream_lanes
from spardl.kernels.cpu.jit import MAGNITUDE, compiled, inlined

# Elements that are added before the list looks at them, while they are still in the nearest cache.
TILE = 256
PAGE = 1024  # elements that are made before they are written, for the same reason
LINE = 16  # floats that memory hands out together
LAST_BIT = np.uint64(1 << 63)


@inlined
def _run(position, stop, starts, chunk):
    """Where the run at natural `position` lies in block order, how long it is, and in which block."""
    count = starts.size - 1
    piece = position // chunk
    offset = position - piece * chunk
    block = piece % count
    return starts[block] + (piece // count) * chunk + offset, min(chunk - offset, stop - position), block


@inlined
def _ask_for_next(acc, at, gradient, i):
    """Have the next tile fetched while this one, which begins at these places, is looked at."""
    for ahead in range(TILE, 2 * TILE, LINE):
        ask_for(acc, at + ahead)
        ask_for(gradient, i + ahead)


@inlined
def _next_bit(word):
    """The position of the lowest bit, any if there is none, and the word without it."""
    return lowest_bit(word | LAST_BIT), word & (word - np.uint64(1))


@inlined
def _note(acc, bits, first, stop, start, listed, places, amounts):
    """Append the entries of [first, stop) whose key reaches the low of their block's list to it; places count from
    `start`.

    Returns the new fill, which also counts entries that find no room, and whether all of them are finite: only then is
    their product with zero zero. Most words have two such entries or fewer, so two are written down whether they are
    there or not: what is written too much is overwritten, and guessing wrong costs more.
    """
    low, begin, end, fill = listed
    nothing = doubt = np.float32(0.0)
    whole = first + (stop - first) // LANES * LANES
    for tile in range(first, whole, LANES):
        found = at_least(bits, tile, low)
        at = begin + fill
        fill += count_bits(found)
        if at + LANES <= end:
            one, found = _next_bit(found)
            two, found = _next_bit(found)
            amount, another = acc[tile + one], acc[tile + two]
            places[at], places[at + 1] = tile + one - start, tile + two - start
            amounts[at], amounts[at + 1] = amount, another
            doubt += amount * nothing
            doubt += another * nothing
            at += 2
        while found:
            place = tile + lowest_bit(found)
            found &= found - np.uint64(1)
            doubt += acc[place] * nothing
            if at < end:
                places[at] = place - start
                amounts[at] = acc[place]
            at += 1
    for place in range(whole, stop):
        if (bits[place] & MAGNITUDE) >= low:
            doubt += acc[place] * nothing
            if begin + fill < end:
                places[begin + fill] = place - start
                amounts[begin + fill] = acc[place]
            fill += 1
    return fill, doubt == nothing


@inlined
def _accumulate(acc, stretch, gradient, scale, wanted, lists):
    """What `accumulate` does, with arguments that belong together put together."""
    starts, chunk, offset = stretch
    lows, edges, fills, places, amounts = lists
    bits = acc.view(np.uint32)
    finite = True
    i = 0
    while i < gradient.size:
        place, length, block = _run(offset + i, offset + gradient.size, starts, chunk)
        for done in range(0, length if wanted[block] else 0, TILE):
            at, size = place + done, min(TILE, length - done)
            old, new = acc[at : at + size], gradient[i + done : i + done + size]
            for j in range(size):
                before = old[j]
                old[j] = before + new[j] * scale
                new[j] = before
            _ask_for_next(acc, at, gradient, i + done)
            listed = BlockList(lows[block], edges[block], edges[block + 1], fills[block])
            fills[block], fine = _note(acc, bits, at, at + size, starts[block], listed, places, amounts)
            finite &= fine
        i += length
    return finite


@compiled(
    "boolean(float32[::1], int64[::1], int64, int64, float32[::1], float32, boolean[::1],"
    " uint32[::1], int64[::1], int64[::1], int32[::1], float32[::1])"
)
def accumulate(acc, starts, chunk, offset, gradient, scale, wanted, lows, edges, fills, places, amounts):
    """acc += scale * gradient, a stretch of natural order, in the `wanted` blocks; gradient becomes what acc was.

    Keeps the lists; says if all sums are finite.
    """
    lists = Lists(lows, edges, fills, places, amounts)
    return _accumulate(acc, Stretch(starts, chunk, offset), gradient, scale, wanted, lists)


@inlined
def _differ(acc, stretch, shared, own, wanted, lists):
    """What `differ` does, with arguments that belong together put together."""
    starts, chunk, offset = stretch
    lows, edges, fills, places, amounts = lists
    bits = acc.view(np.uint32)
    finite = True
    i = 0
    while i < own.size:
        place, length, block = _run(offset + i, offset + own.size, starts, chunk)
        for done in range(0, length if wanted[block] else 0, TILE):
            at, size = place + done, min(TILE, length - done)
            out, left = acc[at : at + size], shared[i + done : i + done + size]
            right = own[i + done : i + done + size]
            for j in range(size):
                out[j] = left[j] - right[j]
            _ask_for_next(shared, i + done, own, i + done)
            listed = BlockList(lows[block], edges[block], edges[block + 1], fills[block])
            fills[block], fine = _note(acc, bits, at, at + size, starts[block], listed, places, amounts)
            finite &= fine
        i += length
    return finite


@compiled(
    "boolean(float32[::1], int64[::1], int64, int64, float32[::1], float32[::1], boolean[::1],"
    " uint32[::1], int64[::1], int64[::1], int32[::1], float32[::1])"
)
def differ(acc, starts, chunk, offset, shared, own, wanted, lows, edges, fills, places, amounts):
    """acc = shared - own, a stretch of natural order, in the `wanted` blocks.

    Keeps the lists; says if all differences are finite.
    """
    lists = Lists(lows, edges, fills, places, amounts)
    return _differ(acc, Stretch(starts, chunk, offset), shared, own, wanted, lists)


@inlined
def _accumulate_momentum(acc, velocity, updated, stretch, gradient, weights, rule, wanted, lists):
    """What `accumulate_momentum` does, with arguments that belong together put together."""
    starts, chunk, offset = stretch
    lows, edges, fills, places, amounts = lists
    scale, momentum, decay, damping, nesterov = rule
    bits = acc.view(np.uint32)
    finite = True
    i = 0
    while i < gradient.size:
        place, length, block = _run(offset + i, offset + gradient.size, starts, chunk)
        for done in range(0, length if wanted[block] else 0, TILE):
            at, size = place + done, min(TILE, length - done)
            old, slow, fast = acc[at : at + size], velocity[at : at + size], updated[at : at + size]
            new, weight = gradient[i + done : i + done + size], weights[i + done : i + done + size]
            for j in range(size):
                fresh = new[j] * scale + decay * weight[j]
                speed = momentum * slow[j] + damping * fresh
                before = old[j]
                old[j] = before + (fresh + momentum * speed if nesterov else speed)
                fast[j] = speed
                new[j] = before
            _ask_for_next(acc, at, gradient, i + done)
            listed = BlockList(lows[block], edges[block], edges[block + 1], fills[block])
            fills[block], fine = _note(acc, bits, at, at + size, starts[block], listed, places, amounts)
            finite &= fine
        i += length
    return finite


@compiled(
    "boolean(float32[::1], float32[::1], float32[::1], int64[::1], int64, int64, float32[::1], float32[::1],"
    " float32, float32, float32, float32, boolean, boolean[::1],"
    " uint32[::1], int64[::1], int64[::1], int32[::1], float32[::1])"
)
def accumulate_momentum(
    acc, velocity, updated, starts, chunk, offset, gradient, weights, scale, momentum, decay, damping, nesterov, wanted,
    lows, edges, fills, places, amounts,
):  # fmt: skip
    """Add momentum SGD's direction, instead of the plain gradient, to acc; `updated` receives the new velocity, and
    gradient what acc was before. Keeps the lists; says if all sums are finite."""
    stretch, rule = Stretch(starts, chunk, offset), Rule(scale, momentum, decay, damping, nesterov)
    lists = Lists(lows, edges, fills, places, amounts)
    return _accumulate_momentum(acc, velocity, updated, stretch, gradient, weights, rule, wanted, lists)


@compiled("void(float32[::1], int64[::1], int64, int64, float32[::1])")
def read(acc, starts, chunk, offset, out):
    """Copy natural positions from `offset` on to `out`."""
    i = 0
    while i < out.size:
        place, length, _ = _run(offset + i, offset + out.size, starts, chunk)
        for j in range(length):
            out[i + j] = acc[place + j]
        i += length


@compiled("void(float32[::1], int64[::1], int64, int64, float32[::1])")
def write(acc, starts, chunk, offset, source):
    """Copy `source` to natural positions from `offset` on."""
    i = 0
    while i < source.size:
        place, length, _ = _run(offset + i, offset + source.size, starts, chunk)
        for j in range(length):
            acc[place + j] = source[i + j]
        i += length


@compiled("void(int64[::1], int64, int64[::1], int32[::1], float32[::1], float32, int64[::1], float32[::1])")
def to_natural_order(starts, chunk, counts, indices, values, factor, positions, ordered):
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
            ordered[done] = values[cursor] * factor
            done += 1
            cursor += 1
        cursors[block] = cursor
        piece += 1


@compiled("void(float32[::1], int64[::1], float32[::1])")
def put_only(out, positions, values):
    """Make `out` zero everywhere but at these positions, which ascend, without reading it.

    Each page is made in the cache and then streamed out: to write single entries into it later would fetch it again.
    """
    page = np.zeros(PAGE, np.float32)
    head = min(out.size, (-out.ctypes.data // 4) % 8)
    done = 0
    for first in range(head - PAGE, out.size, PAGE):
        begun, start, stop = done, max(first, 0), min(first + PAGE, out.size)
        while done < positions.size and positions[done] < stop:
            page[positions[done] - start] = values[done]
            done += 1
        whole = (stop - start) // LANES * LANES if first >= 0 else 0
        for i in range(0, whole, LANES):
            stream_lanes(out, start + i, page, i)
        for i in range(whole, stop - start):
            out[start + i] = page[i]
        for i in range(begun, done):
            page[positions[i] - start] = 0.0


@compiled("void(float32[::1], int64[::1], float32[::1], float32[::1])")
def changes(acc, positions, before, sent):
    """What positions held when they were first changed, less what they hold now; `acc` then holds the former."""
    for i in range(positions.size):
        sent[i] = -acc[positions[i]]
    for i in range(positions.size - 1, -1, -1):
        acc[positions[i]] = before[i]
    for i in range(positions.size):
        sent[i] += acc[positions[i]]


@compiled("void(int64[::1], int64[::1], int64, int64, int64[::1])")
def natural_positions(positions, starts, chunk, shift, natural):
    """Where places in block order lie in natural order; `chunk` is 2**`shift`, or no power of two if that is negative.

    A shift is ten times as fast as a division.
    """
    count = starts.size - 1
    block = 0
    for i in range(positions.size):
        place = positions[i]
        if place < starts[block] or place >= starts[block + 1]:
            block = np.searchsorted(starts, place, side="right") - 1
        slot = place - starts[block]
        piece = slot >> shift if shift >= 0 else slot // chunk
        natural[i] = (piece * count + block) * chunk + slot - piece * chunk


@compiled("int64(int64[::1], float32[::1], int64[::1], float32[::1], int64)")
def by_position(positions, values, room, room_values, length):
    """Sort both by position, below `length`, eight bits at a time from the lowest on, to and fro between them and the
    room. Returns how often they were moved: an odd number, and they are in the room."""
    places = np.empty(256, np.int64)
    here, here_values, there, there_values = positions, values, room, room_values
    moves = 0
    while (length - 1) >> (8 * moves):
        shift = 8 * moves
        places[:] = 0
        for i in range(here.size):
            places[(here[i] >> shift) & 255] += 1
        begin = 0
        for digit in range(256):
            begin, places[digit] = begin + places[digit], begin
        for i in range(here.size):
            digit = (here[i] >> shift) & 255
            there[places[digit]] = here[i]
            there_values[places[digit]] = here_values[i]
            places[digit] += 1
        here, here_values, there, there_values = there, there_values, here, here_values
        moves += 1
    return moves


@compiled("void(float32[::1], float32[::1], int64[::1], float32[::1], int64[::1], float32[::1])")
def land(shared, own, support, step, touched, sent):
    """shared -= step at `support`; own so that `sent` is gone from shared - own at `touched`, and nothing elsewhere."""
    left = np.empty(touched.size, np.float32)
    for i in range(touched.size):
        place = touched[i]
        left[i] = shared[place] - own[place] - sent[i]
    for i in range(support.size):
        place = support[i]
        shared[place] -= step[i]
        own[place] -= step[i]
    for i in range(touched.size):
        place = touched[i]
        own[place] = shared[place] - left[i]
