"""Index coding: close to entropy on average, and never larger than what both sides can compute in advance."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import tries
from spardl.kernels.cpu import gaps
from spardl.kernels.torch_frames import plan_gaps


def ints(*values):
    return np.array(values, dtype=np.int64)


def compiled_plan(counts, lengths):
    """What the compiled loops plan for each block, which need not ask anybody else for it."""
    plans = [gaps.plan_block(int(count), int(length)) for count, length in zip(counts, lengths, strict=True)]
    return ints(*(width for width, _ in plans)), ints(*(worst for _, worst in plans))


def plan(counts, lengths):
    """Low bits and worst case of each block, on which all kernels agree."""
    widths, worst = compiled_plan(counts, lengths)
    for found, expected in zip(plan_gaps(counts, lengths), (widths, worst), strict=True):
        np.testing.assert_array_equal(found, expected)
    return widths, worst


def coded_bytes(length, indices):
    counts = ints(len(indices))
    widths, worst = plan(counts, ints(length))
    out = np.empty((int(worst[0]) + 7) // 8, np.uint8)
    return gaps.write_gaps(out, widths, counts, np.array(indices, dtype=np.int32))


def low_bits(counts, lengths):
    return plan(counts, lengths)[0]


def worst_bits(counts, lengths):
    return plan(counts, lengths)[1]


def entropy(length, count):
    """Bits per entry that a random subset of this size needs at least: log2 of the number of subsets, per entry."""
    choices = math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)
    return choices / math.log(2) / count


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("length", [100_000, 1_000_000, 3_000_017])
def test_random_subsets_cost_little_more_than_their_entropy(length, density):
    """The allowance is 0.8 bit; 0.1 is what it takes, but for a hundred entries, where luck and the last byte count."""
    count = round(density * length)
    indices = np.sort(np.random.default_rng(7).choice(length, count, replace=False))
    assert 8 * coded_bytes(length, indices) / count < entropy(length, count) + (0.1 if count >= 1000 else 0.8)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_even_the_worst_subset_stays_within_the_allowance(density):
    """Capacity, too, lies less than 0.8 bit above entropy: a receiver reserves little that is not used."""
    length = 1_000_000
    count = round(density * length)
    assert worst_bits(ints(count), ints(length))[0] / count < entropy(length, count) + 0.8


@given(length=st.integers(1, 10**9), share=st.floats(0, 1), more=st.integers(1, 1000))
@tries(300)
def test_the_worst_case_grows_with_the_count(length, share, more):
    """So a frame with fewer entries than the budget always fits where the budget was reserved."""
    count = int(share * length)
    larger = min(length, count + more)
    few, many = worst_bits(ints(count, larger), ints(length, length))
    assert few <= many


def test_the_worst_case_of_small_blocks_grows_with_every_entry():
    for length in range(1, 70):
        bits = worst_bits(np.arange(length + 1), np.full(length + 1, length))
        assert (np.diff(bits) >= 0).all()
        assert bits[0] == 0


@given(length=st.integers(1, 2**31 - 1), share=st.floats(0, 1))
@tries(300)
def test_the_split_is_the_one_with_the_smallest_worst_case(length, share):
    """All quotients together are at most (length - count) >> l, each with a bit to end it, besides l low bits each."""
    count = int(share**8 * length)
    worst = [count * (low + 1) + (length - count >> low) for low in range(32)] if count else [0] * 32
    assert worst_bits(ints(count), ints(length)).tolist() == [min(worst)]
    assert low_bits(ints(count), ints(length)).tolist() == [worst.index(min(worst))]


def adversarial(length, count, kind, seed):
    """Subsets that are expensive or odd: crowded at an end, evenly spread, or all but one in a crowd."""
    random = np.random.default_rng(seed)
    if kind == "first":
        return np.arange(count)
    if kind == "last":
        return np.arange(length - count, length)
    if kind == "spread":
        return (np.arange(1, count + 1) * length // count) - 1 if count else np.arange(0)
    if kind == "lone":
        return np.unique(np.append(np.arange(count - 1), length - 1)) if count else np.arange(0)
    if kind == "clustered":
        start = random.integers(0, length - min(length, 2 * count) + 1)
        return start + np.sort(random.choice(min(length, 2 * count), count, replace=False))
    return np.sort(random.choice(length, count, replace=False))


@given(
    length=st.integers(1, 5000),
    share=st.floats(0, 1),
    kind=st.sampled_from(["first", "last", "spread", "lone", "clustered", "random"]),
    seed=st.integers(0, 2**32 - 1),
)
@tries(300)
def test_no_subset_takes_more_than_the_worst_case(length, share, kind, seed):
    indices = adversarial(length, int(share * length), kind, seed)
    worst = int(worst_bits(ints(len(indices)), ints(length))[0])
    assert coded_bytes(length, indices) <= (worst + 7) // 8


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 10])
def test_the_worst_case_is_reached_but_not_passed_by_all_subsets_of_small_blocks(length):
    """Each of the 2**length subsets, with its size counted in bits."""
    worst = {}
    for chosen in range(1 << length):
        indices = [i for i in range(length) if chosen >> i & 1]
        width = int(low_bits(ints(len(indices)), ints(length))[0])
        quotients = sum(int(gap - 1) >> width for gap in np.diff([-1, *indices]))
        bits = len(indices) * (width + 1) + quotients
        worst[len(indices)] = max(worst.get(len(indices), 0), bits)
    expected = worst_bits(np.arange(length + 1), np.full(length + 1, length))
    assert [worst[count] for count in range(length + 1)] == expected.tolist()
