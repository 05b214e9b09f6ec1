"""Blocks: every element lies in exactly one, all are fair samples, and budgets add up to the density."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effort import tries
from spardl.errors import ConfigError
from spardl.memory.layout import BlockLayout, entries

kinds = pytest.mark.parametrize("make", [BlockLayout.interleaved, BlockLayout.contiguous], ids=lambda m: m.__name__)
lengths = st.integers(0, 5000)
counts = st.integers(1, 40)
densities = st.floats(1e-6, 1)
examples = tries(200)


def owners(layout):
    """The block of each natural element: chunks are dealt in turn."""
    return np.arange(layout.length) // layout.chunk % layout.count


@kinds
@given(length=lengths, count=counts)
@example(length=1, count=5)
@example(length=0, count=3)
@example(length=3, count=4)
@examples
def test_every_element_lies_in_exactly_one_block(make, length, count):
    layout = make(length, count)
    assert layout.lengths.sum() == length
    assert layout.lengths.tolist() == np.bincount(owners(layout), minlength=count).tolist()
    assert layout.starts.tolist() == [0, *np.cumsum(layout.lengths)]
    assert layout.starts[-1] == length


@given(length=st.integers(1, 10**8), count=st.integers(1, 300))
@examples
def test_interleaved_blocks_are_fair_samples(length, count):
    """Lengths differ by a chunk at most; a block has 512 chunks or more, unless chunks are as small as can be."""
    layout = BlockLayout.interleaved(length, count)
    assert layout.lengths.max() - layout.lengths.min() <= layout.chunk
    assert 1 <= layout.chunk <= 8192 and layout.chunk & (layout.chunk - 1) == 0
    assert layout.chunk == 1 or layout.lengths.max() // layout.chunk >= 512


@given(length=lengths, count=counts)
@examples
def test_contiguous_blocks_are_stretches_in_order(length, count):
    layout = BlockLayout.contiguous(length, count)
    assert (np.diff(owners(layout)) >= 0).all()


@kinds
@given(length=lengths, count=counts, density=densities)
@example(length=9, count=8, density=1.0)
@example(length=3, count=2, density=1.0)
@examples
def test_budgets_add_up_to_the_density_but_starve_no_block(make, length, count, density):
    """k in all, or a little more where a block would have had none; never more than a block holds."""
    layout = make(length, count)
    budgets = layout.budgets(density)
    k = entries(density, length)
    assert (budgets <= layout.lengths).all()
    assert (budgets[layout.lengths > 0] >= 1).all()
    assert k <= budgets.sum() <= k + count
    if k == length:
        assert budgets.tolist() == layout.lengths.tolist()
    shares = layout.lengths * (k / max(1, length))
    assert (np.abs(budgets - np.maximum(shares, layout.lengths > 0)) <= 1).all()


@kinds
def test_equal_blocks_get_equal_budgets(make):
    assert make(4096, 4).budgets(0.125).tolist() == [128] * 4


@pytest.mark.parametrize(
    "density,length,expected",
    [(0.01, 1000, 10), (0.01, 10, 1), (1.0, 7, 7), (0.5, 0, 0), (1e-9, 1, 1), (0.999999, 10, 10)],
)
def test_a_density_allows_at_least_one_entry(density, length, expected):
    assert entries(density, length) == expected


def test_blocks_beyond_32_bit_indices_are_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match="groups=2147483647"):
        BlockLayout.interleaved(2**31, 1).budgets(0.01)
    assert BlockLayout.interleaved(2**31, 2).budgets(0.01).sum() == round(0.01 * 2**31)
