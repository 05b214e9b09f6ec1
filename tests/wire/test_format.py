"""Value formats: round to nearest even, saturate instead of overflowing, and let the sender keep what was lost."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effort import tries
from formats import GRID2, GRID4, NARROW
from spardl.wire.format import VALUE_FORMATS, ScaledFormat

FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "int1")
LARGEST = float(np.finfo(np.float32).max)
finite = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50)
ordinary = st.lists(st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 2**-60), max_size=50)
examples = tries(150)


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def rounded(values, form, counts=None):
    """What every rank decodes, and the error that the sender keeps."""
    counts = np.array([len(values)] if counts is None else counts, dtype=np.int64)
    form = VALUE_FORMATS.get(form, form)
    codes, scales = form.encode(values, counts)
    assert codes.dtype == form.dtype
    assert len(scales) == form.scales_of(counts)
    decoded = form.decode(codes, scales, counts)
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


@pytest.mark.parametrize("form,levels", [("int8", 127), (GRID4, 7), (GRID2, 1)])
@given(blocks=st.lists(ordinary, max_size=4))
@examples
def test_scaled_values_are_off_by_half_a_step_at_most(form, levels, blocks):
    """A step is the largest magnitude of the block over the levels; blocks do not disturb each other."""
    values = tensor([value for block in blocks for value in block])
    decoded, _ = rounded(values, form, [len(block) for block in blocks])
    done = 0
    for block in blocks:
        step = max(map(abs, block), default=0.0) / levels
        for value, back in zip(block, decoded[done : done + len(block)].tolist(), strict=True):
            assert abs(value - back) <= step / 2 * (1 + 1e-5)
        done += len(block)


@pytest.mark.parametrize("form", ["int8", "int4", "int2", "int1", GRID4, GRID2])
@given(values=finite)
@examples
def test_scaled_formats_give_finite_values_and_errors_for_any_finite_input(form, values):
    """From the smallest denormals to the largest float32."""
    decoded, error = rounded(tensor(values), form)
    assert torch.isfinite(decoded).all() and torch.isfinite(error).all()


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_and_empty_blocks_survive(form):
    decoded, error = rounded(tensor([0.0, 0.0]), form, [0, 2, 0])
    assert decoded.tolist() == error.tolist() == [0, 0]
    assert rounded(tensor([]), form, [])[0].numel() == 0


# --- what a format says about itself -----------------------------------------------------------------------------


def test_every_format_has_a_name_and_a_code_of_its_own():
    assert all(form.name == name for name, form in VALUE_FORMATS.items())
    assert len({form.code for form in VALUE_FORMATS.values()}) == len(VALUE_FORMATS)


@pytest.mark.parametrize("form", [*VALUE_FORMATS.values(), *NARROW], ids=lambda form: form.name)
def test_a_format_tells_the_truth_about_itself(form):
    """What is exact has no error, what carries no values has no codes, and codes in memory are not narrower than
    on the wire."""
    values, counts = tensor([1.0, -3.7, 0.3, 1e-3]), np.array([3, 1])
    codes, scales = form.encode(values, counts)
    decoded = form.decode(codes, scales, counts)
    assert decoded.dtype == torch.float32 and len(decoded) == 4
    assert form.carries_values == bool(len(codes))
    assert not form.exact or not form.carries_values or torch.equal(decoded, values)
    assert form.bits <= 8 * form.dtype.itemsize
    for count in (0, 1, 7, 8, 9):
        assert 8 * form.size(count) - 8 < count * form.bits <= 8 * form.size(count)


@pytest.mark.parametrize("form", [*VALUE_FORMATS.values(), *NARROW], ids=lambda form: form.name)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_the_bits_that_say_not_finite_are_set_in_such_codes_and_in_no_others(form, bad):
    """Where a format can say it at all; a scaled one says it by its scale."""
    if not form.not_finite:
        return
    codes, _ = form.encode(tensor([1.0, LARGEST, bad, -LARGEST, 0.0]), np.array([5]))
    words = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.itemsize])
    assert (words & form.not_finite == form.not_finite).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("form", ["int8", GRID4, GRID2])
def test_the_largest_scale_times_any_code_is_finite_and_twice_of_it_is_not(form):
    form = VALUE_FORMATS.get(form, form)
    worst = tensor([-(2.0 ** (form.bits - 1))])
    assert torch.isfinite(worst * tensor([form.largest_scale]))
    assert not torch.isfinite(worst * tensor([form.largest_scale]) * 2)


def test_a_format_that_no_frame_can_hold_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="'int3' cannot have 3 bits; choose from"):
        ScaledFormat("int3", 5, bits=3)
    with pytest.raises(ValueError, match="'int4' cannot have code 8; choose one from 0 to 7"):
        ScaledFormat("int4", 8, bits=4)


def test_the_formats_can_be_listed_without_torch_or_numpy():
    """The settings name them, and the command line starts before either is needed."""
    listing = "import sys, spardl.wire.format as f; print(*f.VALUE_FORMATS, *({'torch', 'numpy'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["fp32", "bf16", "fp16", "int8", "none", "int4", "int2", "int1"]
