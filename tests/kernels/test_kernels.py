"""Every kernel, compiled and portable, against a few obvious lines of numpy; both give the same bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effort import tries
from spardl import kernels as kernel_choice
from spardl.kernels import torch_frames
from spardl.kernels.cpu import gaps
from spardl.kernels.torch import TorchKernels
from spardl.memory.layout import BlockLayout

compiled = kernel_choice.for_device(torch.device("cpu"))
portable = TorchKernels()

both = pytest.mark.parametrize("kernels", [compiled, portable], ids=["compiled", "portable"])
examples = tries(60)

TINY = 2.0**-149  # the smallest float32 above zero
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([1.0, 0.5, 1 / 65536, 0.1, 3.0, -1.0, 0.0])
floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, TINY, -TINY, 1e-40, -1e-40, 3.4e38]
)
blocks_of_floats = st.lists(st.lists(floats, max_size=40), max_size=4)
layouts = st.builds(BlockLayout, length=st.integers(1, 300), count=st.integers(1, 9), chunk=st.integers(1, 40))
LARGEST_BF16 = float(torch.finfo(torch.bfloat16).max)
KINDS = ("heavy", "ties", "equal", "denormal", "sparse", "one bin", "neighbours", "zeros")


def numbers(length, seed, kind="heavy"):
    """A gradient-like vector, or one that is awkward in a certain way."""
    random = np.random.default_rng(seed)
    heavy = random.standard_normal(length).astype(np.float32) ** 3
    return {
        "heavy": heavy,
        "ties": heavy.round(),
        "equal": np.full(length, -2.5, np.float32) * random.choice([-1, 1], length).astype(np.float32),
        "denormal": (random.integers(-40, 41, length) * TINY).astype(np.float32),
        "sparse": heavy * (random.random(length) < 0.02),
        "one bin": (1 + random.random(length) / 16).astype(np.float32),
        "neighbours": (0x3F800000 + random.integers(0, 1024, length)).astype(np.uint32).view(np.float32),
        "zeros": random.choice(np.array([0.0, -0.0], np.float32), length),
    }[kind].astype(np.float32)


def tensor(values, dtype=np.float32):
    return torch.from_numpy(np.array(values, dtype=dtype))


def ints(values):
    return np.array(values, dtype=np.int64)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual.view(f"u{actual.itemsize}"), expected.view(f"u{expected.itemsize}"))


def largest(values, budget):
    """Positions of the `budget` largest magnitudes, ties to the lowest index, zeros never."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[: max(budget, 0)]
    return np.array(sorted(i for i in order if values[i] != 0), dtype=np.int32)


# --- selection ---------------------------------------------------------------------------------------------------


def check_take_largest(kernels, blocks, budgets):
    acc = tensor(np.concatenate([np.float32([7, 7]), *blocks, np.float32([9])]))
    stops = 2 + np.cumsum([len(block) for block in blocks], dtype=np.int64)
    firsts = stops - ints([len(block) for block in blocks])
    counts, indices, values = kernels.take_largest(acc, firsts, stops, ints(budgets))
    expected = [largest(block, budget) for block, budget in zip(blocks, budgets, strict=True)]
    left = [block.copy() for block in blocks]
    for block, taken in zip(left, expected, strict=True):
        block[taken] = 0
    assert counts.tolist() == [len(taken) for taken in expected]
    assert_same_bits(indices, np.concatenate([np.int32([]), *expected]))
    taken = [block[chosen] for block, chosen in zip(blocks, expected, strict=True)]
    assert_same_bits(values, np.concatenate([np.float32([]), *taken]))
    assert_same_bits(acc, np.concatenate([np.float32([7, 7]), *left, np.float32([9])]))


@both
@given(length=st.integers(0, 300), kind=st.sampled_from(KINDS), share=st.floats(0, 1.1), seed=seeds)
@examples
def test_what_is_taken_rounded_and_what_stays_make_up_the_entry(kernels, length, kind, share, seed):
    """The same entries as unrounded, as the nearest bf16; 3.4e38 has none that is finite and above it."""
    before = torch.cat([tensor(numbers(length, seed, kind)), torch.tensor([3.4e38, -3.4e38])])
    exact, rounded = before.clone(), before.clone()
    place = (ints([0]), ints([length + 2]), ints([int(share * length) + 2]))
    counts, indices, values = kernels.take_largest(exact, *place)
    same_counts, same_indices, codes, fine = kernels.take_rounded(rounded, *place)
    assert fine and counts.tolist() == same_counts.tolist()
    assert_same_bits(same_indices, indices)
    nearest = torch.as_tensor(values).clamp(-LARGEST_BF16, LARGEST_BF16).bfloat16()
    assert torch.equal(kernels.tensor(codes, torch.bfloat16), nearest)
    assert_same_bits(kernels.widen_bf16(codes), nearest.float())
    exact[torch.as_tensor(indices).long()] = torch.as_tensor(values) - nearest.float()
    assert torch.equal(rounded, exact)


@both
@pytest.mark.parametrize("sum_", [math.inf, -math.inf])
def test_a_sum_that_is_not_finite_is_noticed_when_it_is_taken_rounded(kernels, sum_):
    acc = torch.ones(100)
    acc[7] = sum_
    assert not kernels.take_rounded(acc, ints([0]), ints([100]), ints([3]))[3]


@both
@given(blocks=blocks_of_floats, data=st.data())
@examples
def test_the_largest_entries_move_out_of_each_block(kernels, blocks, data):
    """Exactly the budget, ties to the lowest index, zeros never; nothing else in memory changes."""
    budgets = [data.draw(st.integers(-1, len(block) + 2)) for block in blocks]
    check_take_largest(kernels, [np.array(block, np.float32) for block in blocks], budgets)


@both
@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=3), share=st.floats(0, 1.1), seed=seeds)
@tries(12)
def test_the_largest_of_long_blocks_are_exact_for_every_kind_of_value(kernels, kind, lengths, share, seed):
    """Long enough that the candidates of the first histogram do, and do not, fit into their room."""
    blocks = [numbers(length, seed + i, kind) for i, length in enumerate(lengths)]
    check_take_largest(kernels, blocks, [int(share * share * length) for length in lengths])


@both
def test_many_denormals_do_not_exceed_a_small_budget(kernels):
    """All of them fall into the lowest bin of the histogram, and it holds more than the budget."""
    check_take_largest(kernels, [np.full(1000, 1e-40, np.float32)], [1])
    check_take_largest(kernels, [numbers(1000, 1, "denormal"), numbers(1000, 2, "denormal")], [3, 500])


@both
@given(block=st.lists(floats, max_size=60), threshold=floats, limit=st.integers(-1, 70), first=st.integers(0, 3))
@examples
def test_entries_above_a_threshold_move_out_until_the_limit(kernels, block, threshold, limit, first):
    values = np.array([5] * first + block + [6], np.float32)
    stop = first + len(block)
    limit_value = np.float32(abs(threshold))
    chosen = [i for i in range(first, stop) if abs(values[i]) >= limit_value and values[i] != 0][: max(limit, 0)]
    acc = tensor(values)
    indices, taken = kernels.take_above(acc, first, stop, threshold, limit)
    assert_same_bits(indices, np.array(chosen, np.int32) - np.int32(first))
    assert_same_bits(taken, values[chosen])
    values[chosen] = 0
    assert_same_bits(acc, values)


@both
@pytest.mark.parametrize("threshold", [0.0, -0.0, 0.1, 1e-40, 1e-60, 1e300, float("inf")])
def test_thresholds_are_compared_as_float32(kernels, threshold):
    """Also those that are too small or too large for it, without a warning."""
    values = np.float32([0, -0.0, 0.1, -0.1, 0.09, 1e-40, -3e38, TINY])
    with np.errstate(over="ignore"):
        expected = [i for i in range(8) if abs(values[i]) >= np.float32(threshold) and values[i] != 0]
    assert kernels.count_above(tensor(values), threshold) == len(expected)
    with np.errstate(over="raise"):
        assert kernels.take_above(tensor(values), 0, 8, threshold, 8)[0].tolist() == expected


@both
@given(values=st.lists(floats, max_size=60), threshold=floats)
@examples
def test_entries_above_a_threshold_are_counted(kernels, values, threshold):
    expected = sum(abs(value) >= abs(threshold) and value != 0 for value in np.float32(values))
    assert kernels.count_above(tensor(values), threshold) == expected


@both
@given(
    values=st.lists(floats, max_size=60), shift=st.integers(0, 31), first=st.integers(0, 2**12), bins=st.integers(1, 9)
)
@examples
def test_magnitudes_are_counted_by_their_leading_bits(kernels, values, shift, first, bins):
    """What lies above the last bin counts in it, what lies below the first nowhere."""
    expected = [0] * bins
    for key in np.abs(np.float32(values)).view(np.uint32).tolist():
        if key >> shift >= first:
            expected[min((key >> shift) - first, bins - 1)] += 1
    counts = kernels.count_bins(tensor(values), first, shift, bins)
    assert np.asarray(counts).dtype == np.int64 and counts.tolist() == expected


@both
@given(values=st.lists(floats, max_size=60), budget=st.integers(-1, 62))
@examples
def test_the_mask_keeps_the_largest_and_the_first_of_equals(kernels, values, budget):
    expected = np.zeros(len(values), bool)
    expected[largest(np.float32(values), budget)] = True
    np.testing.assert_array_equal(kernels.keep_largest(tensor(values), budget), expected)


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 30, 1999])
def test_the_mask_is_exact_for_every_kind_of_value(kernels, kind, budget):
    values = numbers(2000, 11, kind)
    kept = np.asarray(kernels.keep_largest(tensor(values), budget))
    np.testing.assert_array_equal(kept.nonzero()[0], largest(values, budget))


@both
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_value_that_is_not_finite_is_seen_anywhere(kernels, bad):
    assert kernels.all_finite(torch.empty(0))
    assert kernels.all_finite(tensor([3.4e38, -3.4e38, TINY, -0.0]))
    for length, place in [(1, 0), (70, 0), (70, 33), (70, 69)]:
        values = torch.ones(length)
        values[place] = bad
        assert not kernels.all_finite(values)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("room", [0, 3, 70, 200])
def test_a_sum_that_is_not_finite_is_noticed_wherever_it_lies_among_large_ones(room, bad):
    """The first, second or third large one of sixty-four, the last few, and where the list has no room left."""
    layout = BlockLayout.contiguous(150, 1)
    large = torch.zeros(150)
    large[[3, 9, 20, 40, 63, 64, 70, 100, 140, 149]] = 5.0
    for place in (*range(150), None):
        listing = compiled.new_shortlist(1)
        listing.lists.lows[:] = np.float32(1).view(np.uint32)
        listing.lists.edges[:] = 0, room
        listing.lists = listing.lists._replace(places=np.empty(room, np.int32), amounts=np.empty(room, np.float32))
        gradient = torch.zeros(150)
        if place is not None:
            gradient[place] = bad
        blocks = (layout.starts, layout.chunk, 0)
        fine = compiled.accumulate(large.clone(), *blocks, gradient, 1.0, np.ones(1, np.bool_), listing)
        assert fine == (place is None)


def test_a_list_that_was_given_up_is_left_alone():
    """Adding more to a step after that must not write into it, nor make it look complete."""
    layout = BlockLayout.contiguous(1000, 1)
    listing = compiled.new_shortlist(1)
    listing.expect_above(np.float32(1).view(np.uint32), 100)
    listing.begin()
    listing.lists.places[:], listing.lists.amounts[:] = -1, -1
    listing.give_up()
    for _ in range(3):
        blocks = (layout.starts, layout.chunk, 0)
        compiled.accumulate(torch.zeros(1000), *blocks, torch.full((1000,), 5.0), 1.0, np.ones(1, np.bool_), listing)
        assert (listing.lists.fills > listing.lists.places.size).all()
        assert (listing.lists.places == -1).all() and (listing.lists.amounts == -1).all()


# --- natural order and block order -------------------------------------------------------------------------------


def block_order(layout):
    """memory[i] holds natural element order[i]: chunk after chunk is dealt to the blocks in turn."""
    return np.argsort(np.arange(layout.length) // layout.chunk % layout.count, kind="stable")


def stretch(data, length):
    offset = data.draw(st.integers(0, length), label="offset")
    return offset, data.draw(st.integers(0, length - offset), label="size")


def some_blocks(layout, seed, stretch):
    """Some or all blocks, and which elements of the stretch lie in them."""
    wanted = np.random.default_rng(seed).random(layout.count) < (0.5 if seed % 2 else 1.0)
    return wanted, wanted[np.arange(layout.length)[stretch] // layout.chunk % layout.count]


@both
@given(layout=layouts, scale=scales, seed=seeds, data=st.data())
@examples
def test_a_gradient_is_added_where_it_belongs_and_becomes_what_was_there(kernels, layout, scale, seed, data):
    """Any chunk, lengths that do not divide, stretches that begin and end inside a chunk; other blocks stay."""
    offset, size = stretch(data, layout.length)
    natural, gradient, order = numbers(layout.length, seed), numbers(size, seed + 1), block_order(layout)
    memory, given_gradient = tensor(natural[order]), tensor(gradient)
    wanted, here = some_blocks(layout, seed, slice(offset, offset + size))
    kernels.accumulate(memory, layout.starts, layout.chunk, offset, given_gradient, scale, wanted)
    before, total = natural[offset : offset + size].copy(), natural[offset : offset + size]
    total[here] += np.float32(scale) * gradient[here]
    assert_same_bits(given_gradient, np.where(here, before, gradient))
    assert_same_bits(memory, natural[order])


@both
@given(layout=layouts, kind=st.sampled_from(["heavy", "zeros", "denormal", "ties"]), seed=seeds, data=st.data())
@examples
def test_a_difference_is_written_where_it_belongs_whatever_was_there(kernels, layout, kind, seed, data):
    """Both sides stay as they are; so do other blocks, and what lies outside the stretch."""
    offset, size = stretch(data, layout.length)
    natural, order = numbers(layout.length, seed), block_order(layout)
    shared, own = numbers(size, seed + 1, kind), numbers(size, seed + 2, kind)
    memory, left, right = tensor(natural[order]), tensor(shared), tensor(own)
    wanted, here = some_blocks(layout, seed, slice(offset, offset + size))
    assert kernels.differ(memory, layout.starts, layout.chunk, offset, left, right, wanted)
    natural[offset : offset + size][here] = (shared - own)[here]
    assert_same_bits(memory, natural[order])
    assert_same_bits(left, shared)
    assert_same_bits(right, own)


@both
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 63, 64, 149])
def test_a_difference_that_is_not_finite_is_noticed(kernels, bad, place):
    layout, own = BlockLayout.interleaved(150, 3), torch.zeros(150)
    own[place] = float(bad)
    memory, blocks = torch.zeros(150), (layout.starts, layout.chunk, 0)
    assert not kernels.differ(memory, *blocks, torch.ones(150), own, np.ones(3, np.bool_))
    assert kernels.differ(memory, *blocks, torch.ones(150), torch.zeros(150), np.ones(3, np.bool_))


@both
@given(layout=layouts, rounds=st.integers(0, 4), seed=seeds)
@examples
def test_changes_are_counted_from_the_first_one_in_natural_order(kernels, layout, rounds, seed):
    """However often a position was changed since, and by whatever."""
    random, natural = np.random.default_rng(seed), block_order(layout)
    start = numbers(layout.length, seed)
    memory, positions, before = tensor(start), [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for _ in range(rounds):
        some = np.unique(random.integers(0, layout.length, 20))
        positions.append(some)
        before.append(memory.numpy()[some])
        memory[torch.from_numpy(some)] = tensor(random.standard_normal(some.size))
    less, places = start - memory.numpy(), np.concatenate(positions)
    given = (torch.from_numpy(places), tensor(np.concatenate(before)))
    found, sent = kernels.changes(memory, layout.starts, layout.chunk, *given)
    assert (np.diff(found) >= 0).all() and set(found.tolist()) == set(natural[places].tolist())
    assert_same_bits(sent, less[np.argsort(natural)[found.numpy()]])


@both
@given(length=st.integers(1, 60), seed=seeds)
@examples
def test_what_was_sent_leaves_the_difference_of_shared_and_own_weights(kernels, length, seed):
    random = np.random.default_rng(seed)
    shared, own = numbers(length, seed), numbers(length, seed + 1)
    support = np.flatnonzero(random.random(length) < 0.3)
    step = numbers(support.size, seed + 2)
    once = np.flatnonzero(random.random(length) < 0.4)
    touched = np.sort(np.concatenate([once, once[::2]]))
    amounts = numbers(length, seed + 3)
    ours, theirs = tensor(own), tensor(shared)
    kernels.land(
        theirs, ours, torch.from_numpy(support), tensor(step), torch.from_numpy(touched), tensor(amounts[touched])
    )
    left = (shared - own) - amounts
    shared[support] -= step
    own[support] -= step
    own[once] = shared[once] - left[once]
    assert_same_bits(theirs, shared)
    assert_same_bits(ours, own)


@both
@given(
    layout=layouts,
    scale=scales,
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 1e-4, 0.1]),
    damping=st.sampled_from([1.0, 0.7]),
    nesterov=st.booleans(),
    kind=st.sampled_from(["heavy", "zeros", "denormal"]),
    seed=seeds,
    data=st.data(),
)
@examples
def test_momentum_adds_what_sgd_would_have_stepped_by(
    kernels, layout, scale, momentum, decay, damping, nesterov, kind, seed, data
):
    """v' = momentum v + damping (scale g + decay w); v' or its Nesterov form is added, and v stays as it was."""
    offset, size = stretch(data, layout.length)
    order, here = block_order(layout), slice(offset, offset + size)
    wanted, mine = some_blocks(layout, seed, here)
    natural, velocity, updated = (numbers(layout.length, seed + i, kind) for i in range(3))
    gradient, weights = numbers(size, seed + 3, kind), numbers(size, seed + 4, kind)
    memory, v, v_new, g = tensor(natural[order]), tensor(velocity[order]), tensor(updated[order]), tensor(gradient)
    place = (layout.starts, layout.chunk, offset)
    rule = (scale, momentum, decay, damping, nesterov)
    kernels.accumulate_momentum(memory, v, v_new, *place, g, tensor(weights), *rule, wanted)
    m, wd, damp, s = np.float32([momentum, decay, damping, scale])
    fresh = gradient * s + wd * weights
    speed = m * velocity[here] + damp * fresh
    assert_same_bits(g, np.where(mine, natural[here], gradient))
    natural[here] = np.where(mine, natural[here] + (fresh + m * speed if nesterov else speed), natural[here])
    updated[here] = np.where(mine, speed, updated[here])
    assert_same_bits(memory, natural[order])
    assert_same_bits(v_new, updated[order])
    assert_same_bits(v, velocity[order])


@both
@given(layout=layouts, seed=seeds, data=st.data())
@examples
def test_reading_and_writing_a_stretch_use_the_same_places(kernels, layout, seed, data):
    offset, size = stretch(data, layout.length)
    natural, source, order = numbers(layout.length, seed), numbers(size, seed + 1), block_order(layout)
    memory, out = tensor(natural[order]), torch.full((size,), torch.nan)
    kernels.read(memory, layout.starts, layout.chunk, offset, out)
    assert_same_bits(out, natural[offset : offset + size])
    kernels.write(memory, layout.starts, layout.chunk, offset, tensor(source))
    natural[offset : offset + size] = source
    assert_same_bits(memory, natural[order])


@both
@given(layout=layouts, share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=seeds)
@examples
def test_entries_of_all_blocks_are_put_into_natural_order(kernels, layout, share, seed):
    chosen = np.random.default_rng(seed).random(layout.length) < share
    natural, order = numbers(layout.length, seed), block_order(layout)
    in_memory = chosen[order].nonzero()[0]
    owners = np.searchsorted(layout.starts, in_memory, side="right") - 1
    counts = np.bincount(owners, minlength=layout.count).astype(np.int64)
    indices = tensor(in_memory - layout.starts[owners], np.int32)
    values = tensor(natural[order][in_memory])
    positions, ordered = kernels.to_natural_order(layout.starts, layout.chunk, counts, indices, values, 1 / 3)
    assert_same_bits(positions, chosen.nonzero()[0])
    assert_same_bits(ordered, natural[chosen] * np.float32(1 / 3))


# --- sparse arithmetic -------------------------------------------------------------------------------------------


def some_indices(length, share, seed):
    return (np.random.default_rng(seed).random(length) < share).nonzero()[0].astype(np.int32)


@both
@given(lengths=st.lists(st.integers(0, 60), max_size=4), share=st.floats(0, 1), seed=seeds)
@examples
def test_entries_are_added_to_their_blocks(kernels, lengths, share, seed):
    memory = numbers(sum(lengths) + 1, seed)
    firsts = np.cumsum([0, *lengths], dtype=np.int64)[:-1]
    chosen = [some_indices(length, share, seed + i) for i, length in enumerate(lengths)]
    indices = np.concatenate([np.int32([]), *chosen])
    values = numbers(len(indices), seed + 9)
    acc = tensor(memory)
    kernels.scatter_add(acc, firsts, ints([len(c) for c in chosen]), tensor(indices, np.int32), tensor(values))
    memory[np.concatenate([np.int64([]), *(first + c for first, c in zip(firsts, chosen, strict=True))])] += values
    assert_same_bits(acc, memory)


@both
@given(
    lengths=st.lists(st.integers(0, 60), max_size=4),
    share=st.floats(0, 1),
    seed=seeds,
    kind=st.sampled_from(["heavy", "zeros"]),
)
@examples
def test_entries_fade_by_what_they_are_compared_with(kernels, lengths, share, seed, kind):
    memory = numbers(sum(lengths) + 1, seed, kind)
    firsts = np.cumsum([0, *lengths], dtype=np.int64)[:-1]
    chosen = [some_indices(length, share, seed + i) for i, length in enumerate(lengths)]
    indices = np.concatenate([np.int32([]), *chosen])
    values = numbers(len(indices), seed + 9, kind)
    faded = tensor(memory)
    kernels.fade(faded, firsts, ints([len(c) for c in chosen]), tensor(indices, np.int32), tensor(values), 3.0)
    places = np.concatenate([np.int64([]), *(first + c for first, c in zip(firsts, chosen, strict=True))])
    for place, value in zip(places, np.abs(values), strict=True):
        most = np.float32(3) * abs(memory[place])
        if most < value:
            memory[place] *= most / value
    assert_same_bits(faded, memory)


@both
@given(share=st.floats(0, 1), seed=seeds, kind=st.sampled_from(["heavy", "ties", "denormal", "zeros"]))
@examples
def test_the_sum_of_two_sparse_vectors_has_no_zeros(kernels, share, seed, kind):
    """Indices ascend, entries that cancel vanish, and the left value comes first in the sum."""
    length = 80
    left, right = some_indices(length, share, seed), some_indices(length, 1 - share / 2, seed + 1)
    left_values, right_values = numbers(len(left), seed + 2, kind), numbers(len(right), seed + 3, kind)
    total = np.zeros(length, np.float32)
    total[left] = left_values
    total[right] += right_values
    indices, values = kernels.merge(
        tensor(left, np.int32), tensor(left_values), tensor(right, np.int32), tensor(right_values), length
    )
    assert_same_bits(indices, total.nonzero()[0].astype(np.int32))
    assert_same_bits(values, total[total != 0])


@both
def test_a_vector_plus_its_negative_is_empty(kernels):
    indices, values = tensor([1, 5, 2**31 - 1], np.int32), tensor([1.5, -TINY, 3e38])
    found, left = kernels.merge(indices, values, indices.clone(), -values, 2**31)
    assert len(found) == len(left) == 0


# --- bits --------------------------------------------------------------------------------------------------------


def write_bits(low_bits, counts, indices):
    """Rice-coded gaps one bit at a time: the low bits of a block's gaps, lowest first, then quotients in unary."""
    bits, done = [], 0
    for width, count in zip(low_bits, counts, strict=True):
        gaps = [int(gap) - 1 for gap in np.diff([-1, *indices[done : done + count]])]
        bits += [gap >> b & 1 for gap in gaps for b in range(width)]
        for gap in gaps:
            bits += [0] * (gap >> width) + [1]
        done += count
    return np.packbits(np.uint8(bits), bitorder="little")


def read_bits(data, low_bits, counts, lengths):
    """Undo `write_bits`, or None where the bits run out, are left over by a byte, or lead out of a block."""
    bits, cursor, indices = np.unpackbits(data, bitorder="little").tolist(), 0, []
    for width, count, length in zip(low_bits, counts, lengths, strict=True):
        low, cursor, index = cursor, cursor + width * count, -1
        for _ in range(count):
            if 1 not in bits[cursor:]:
                return None
            quotient = bits[cursor:].index(1)
            index += 1 + (quotient << width) + sum(bits[low + b] << b for b in range(width))
            if index >= length:
                return None
            indices.append(index)
            low, cursor = low + width, cursor + quotient + 1
    return np.int32(indices) if (cursor + 7) // 8 == len(data) else None


@st.composite
def coded_blocks(draw, widest=20):
    """Widths, and gaps whose quotients stay short, for several blocks, empty ones among them."""
    blocks = draw(
        st.lists(
            st.tuples(
                st.integers(0, widest),
                st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2**31 - 1)), max_size=12),
            ),
            max_size=5,
        )
    )
    widths, counts, indices, lengths = [], [], [], []
    for width, pairs in blocks:
        gaps = [(quotient << width) + low % (1 << width) for quotient, low in pairs]
        found = np.cumsum([gap + 1 for gap in gaps], dtype=np.int64) - 1
        widths.append(width)
        counts.append(len(pairs))
        indices += found.tolist()
        lengths.append(int(found[-1]) + 1 if len(pairs) else 0)
    return ints(widths), ints(counts), indices, ints(lengths)


def write_gaps(kernels, out, widths, counts, indices):
    if kernels is portable:
        return torch_frames.write_gaps(out, widths, counts, indices)
    return gaps.write_gaps(out.numpy(), widths, counts, indices.numpy())


def read_gaps(kernels, data, widths, counts, lengths):
    if kernels is portable:
        found, fine, size = torch_frames.read_gaps(data, widths, counts, lengths)
        return found if fine and size == data.numel() else None
    indices = torch.empty(int(counts.sum()), dtype=torch.int32)
    bits = gaps.read_gaps(data.numpy(), widths, counts, lengths, indices.numpy())
    return indices if bits >= 0 and (bits + 7) // 8 == data.numel() else None


def written(kernels, room, widths, counts, indices):
    """Into memory that is not zero."""
    data = torch.full((room,), 0xA5, dtype=torch.uint8)
    assert write_gaps(kernels, data, widths, counts, tensor(indices, np.int32)) == room
    return data


@both
@given(blocks=coded_blocks())
@examples
def test_gaps_come_back_from_their_bits(kernels, blocks):
    """Several blocks, empty ones too, any split; the bytes are those of the obvious coder, and nothing is left over."""
    widths, counts, indices, lengths = blocks
    expected = write_bits(widths.tolist(), counts.tolist(), indices)
    data = written(kernels, len(expected), widths, counts, indices)
    assert_same_bits(data, expected)
    assert_same_bits(read_gaps(kernels, data, widths, counts, lengths), np.int32(indices))
    for block in counts.nonzero()[0]:
        shorter = lengths - (np.arange(len(lengths)) == block)
        assert read_gaps(kernels, data, widths, counts, shorter) is None


@both
@pytest.mark.parametrize("width", [0, 1, 7, 8, 24, 28, 30, 31])
def test_the_widest_splits_and_the_last_index_of_the_longest_block_survive(kernels, width):
    indices = [0, 5] if width < 24 else [0, 5, 2**24 + 3, 2**31 - 2]
    widths, counts, lengths = ints([width]), ints([len(indices)]), ints([indices[-1] + 1])
    expected = write_bits([width], [len(indices)], indices)
    data = written(kernels, len(expected), widths, counts, indices)
    assert_same_bits(data, expected)
    assert_same_bits(read_gaps(kernels, data, widths, counts, lengths), np.int32(indices))


@both
@given(
    data=st.binary(max_size=60),
    blocks=st.lists(
        st.tuples(st.integers(0, 31), st.integers(0, 12), st.sampled_from([0, 1, 9, 100, 2**20, 2**31 - 1])),
        max_size=4,
    ),
)
@tries(300)
def test_any_bytes_are_read_as_the_obvious_reader_would_or_refused(kernels, data, blocks):
    """What is read ascends and stays inside its block, whatever came over the network."""
    widths, counts, lengths = (ints([block[i] for block in blocks]) for i in range(3))
    found = read_gaps(kernels, tensor(list(data), np.uint8), widths, counts, lengths)
    expected = read_bits(np.frombuffer(data, np.uint8), widths.tolist(), counts.tolist(), lengths.tolist())
    if expected is None:
        assert found is None
    else:
        assert_same_bits(found, expected)


@both
@pytest.mark.parametrize("width", [0, 20, 31])
def test_a_quotient_of_a_million_is_refused(kernels, width):
    """A long run of zero bits, as an attacker or a broken disk would send: no overflow, no write."""
    data = torch.zeros(125_000, dtype=torch.uint8)
    data[-1] = 128
    assert read_gaps(kernels, data, ints([width]), ints([1]), ints([2**16])) is None
    data[0] = 1 << (width % 8)
    assert read_gaps(kernels, data, ints([width]), ints([2]), ints([2**16])) is None
