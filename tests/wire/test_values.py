"""Value formats: round to nearest even, saturate instead of overflowing, and let the sender keep what was lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.wire import values as value_codes

FORMATS = ("fp32", "bf16", "fp16", "int8")
LARGEST = float(np.finfo(np.float32).max)
finite = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50)
ordinary = st.lists(st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 2**-60), max_size=50)
examples = settings(max_examples=150, deadline=None)


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def rounded(values, form, counts=None):
    """What every rank decodes, and the error that the sender keeps."""
    counts = np.array([len(values)] if counts is None else counts, dtype=np.int64)
    codes, scales = value_codes.encode(values, counts, form)
    assert codes.dtype == value_codes.CODE_TYPES[form]
    decoded = value_codes.decode(codes, scales, counts)
    return decoded, values - decoded


@given(values=finite)
@examples
def test_bf16_rounds_to_the_nearest_and_to_even_in_the_middle(values):
    bits = np.array(values, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    largest = np.uint32(0x7F7F0000)
    overflow = (nearest & 0x7FFFFFFF) > largest
    nearest[overflow] = (nearest[overflow] & 0x80000000) | largest
    decoded, _ = rounded(tensor(values), "bf16")
    np.testing.assert_array_equal(decoded.numpy().view(np.uint32), nearest.astype(np.uint32))


@given(values=finite)
@examples
def test_fp16_rounds_to_the_nearest_and_to_even_in_the_middle(values):
    expected = np.clip(np.array(values, np.float32), -65504, 65504).astype(np.float16).astype(np.float32)
    decoded, _ = rounded(tensor(values), "fp16")
    np.testing.assert_array_equal(decoded.numpy(), expected)


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
@given(values=finite)
@examples
def test_value_and_error_add_up_to_the_original(form, values):
    """Exactly, where nothing saturates in fp16: the rounding error is itself a float32, so nothing at all is lost."""
    original = tensor(values).clamp(-65504, 65504) if form == "fp16" else tensor(values)
    decoded, error = rounded(original, form)
    assert torch.equal(decoded + error, original)
    if form == "fp32":
        assert not error.any()


def test_what_overflows_saturates_and_the_error_is_kept():
    decoded, error = rounded(tensor([1e6, -1e6, 65519.0, 65520.0]), "fp16")
    assert decoded.tolist() == [65504, -65504, 65504, 65504]
    assert error.tolist() == [1e6 - 65504, 65504 - 1e6, 15, 16]
    for form in FORMATS:
        decoded, error = rounded(tensor([LARGEST, -LARGEST, 1.0]), form)
        assert torch.isfinite(decoded).all() and torch.isfinite(error).all()
        assert decoded[0] > 0 > decoded[1]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden(form, bad):
    """An overflow that happened before must be seen by whoever checks the decoded values, not turned into an error."""
    decoded, _ = rounded(tensor([1.0, bad, 2.0]), form)
    assert not torch.isfinite(decoded).all()


@given(blocks=st.lists(ordinary, max_size=4))
@examples
def test_eight_bits_are_off_by_half_a_step_at_most(blocks):
    """A step is the largest magnitude of the block over 127; blocks do not disturb each other."""
    values = tensor([value for block in blocks for value in block])
    decoded, _ = rounded(values, "int8", [len(block) for block in blocks])
    done = 0
    for block in blocks:
        step = max(map(abs, block), default=0.0) / 127
        for value, back in zip(block, decoded[done : done + len(block)].tolist(), strict=True):
            assert abs(value - back) <= step / 2 * (1 + 1e-5)
        done += len(block)


@given(values=finite)
@examples
def test_eight_bits_give_finite_values_and_errors_for_any_finite_input(values):
    """From the smallest denormals to the largest float32."""
    decoded, error = rounded(tensor(values), "int8")
    assert torch.isfinite(decoded).all() and torch.isfinite(error).all()


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_and_empty_blocks_survive(form):
    decoded, error = rounded(tensor([0.0, 0.0]), form, [0, 2, 0])
    assert decoded.tolist() == error.tolist() == [0, 0]
    assert rounded(tensor([]), form, [])[0].numel() == 0
