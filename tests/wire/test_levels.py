"""Values of 4, 2 and 1 bit: the levels are those that the page of the wire describes, few bits tell of them, and their
error is nearly the least that so many levels can have."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effort import tries
from spardl.bench.limits import index_bits
from spardl.errors import ProtocolError
from spardl.kernels import for_device
from spardl.kernels.torch import TorchKernels
from spardl.sparse import SparseBlocks
from spardl.wire import vector
from spardl.wire.format import VALUE_FORMATS
from spardl.wire.frame import Codec, CodedBlocks

COMPILED, PORTABLE = for_device(torch.device("cpu")), TorchKernels()
FORMATS = [VALUE_FORMATS[name] for name in ("int4", "int2", "int1")]
PER_SCALE = 1400
LARGEST = float(np.finfo(np.float32).max)
every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
seeds = st.integers(0, 2**32 - 1)
PEER = 3


def ints(values):
    return np.array(values, dtype=np.int64)


def floats(values):
    return torch.tensor(values, dtype=torch.float32)


def rounded(form, values, counts=None):
    counts = ints([len(values)] if counts is None else counts)
    return form.decode(*form.encode(values, counts), counts)


def lost(values, decoded):
    """The share of the squares that rounding has cost."""
    return float((values - decoded).double().square().sum() / values.double().square().sum())


def levels_of(form, scale):
    """As the page of the wire says, one after the other."""
    word = int(np.float32(scale).view(np.uint32))
    largest = float(np.uint32(word & 0xFFFF0000).view(np.float32))
    smallest = largest * (word & 0xFFFF) / 65536
    many = 2 ** (form.bits - 1)
    way = [(j * j - 1) / (many * many - 1) if many > 1 else 0.0 for j in range(1, many + 1)]
    return [smallest + (largest - smallest) * part for part in way]


def selected(kind, length=400_000, seed=0):
    """The largest hundredth of a random vector, in order."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(length, generator=random)
    sides = torch.rand(length, generator=random) - 0.5
    values = {"gauss": normal, "laplace": sides.sign() * -(2 * sides.abs()).log(), "cubes": normal**3}[kind]
    return values[values.abs().topk(length // 100).indices.sort().values]


# --- what a code and a scale stand for ---------------------------------------------------------------------------


@every_format
@given(word=st.integers(0, 2**32 - 1))
@tries(300)
def test_levels_are_those_that_the_page_describes(form, word):
    """For any scale that frames let through, with either sign; and none of them is beyond float32."""
    scale = np.uint32(word).view(np.float32)
    if not abs(scale) <= form.largest_scale:
        return
    codes = torch.arange(-form.levels, form.levels).to(form.dtype)
    found = form.decode(codes, floats([scale]), ints([len(codes)]))
    expected = np.array(levels_of(form, scale))
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found, np.concatenate((-expected, expected)), rtol=1e-6, atol=1e-44)


@every_format
@given(values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=60))
@tries(200)
def test_every_value_takes_the_nearest_level_and_keeps_its_sign(form, values):
    """Up to half a unit, of which there are 180 between the smallest and the largest magnitude."""
    values = floats(values)
    codes, scales = form.encode(values, ints([len(values)]))
    decoded = form.decode(codes, scales, ints([len(values)]))
    assert torch.equal(decoded.signbit(), values.signbit())
    magnitudes = values.abs().double()
    unit = max(magnitudes.max() - magnitudes.min(), magnitudes.max() / 5000) / 180
    nearest = (magnitudes[:, None] - torch.tensor(levels_of(form, scales[0]))).abs().amin(1)
    assert ((magnitudes - decoded.abs()).abs() <= nearest + 1.01 * unit + 1e-36).all()


@every_format
@pytest.mark.parametrize("value", [1.0, -3.3, 1e-30, -1e30, 1e-42, LARGEST, 0.0])
@pytest.mark.parametrize("count", [1, 2, 1400, 1401])
def test_values_that_are_all_alike_have_the_error_of_a_bf16(form, value, count):
    decoded = rounded(form, torch.full((count,), value))
    assert ((decoded - value).abs() <= abs(value) / 250 + 2.0**-134).all()


@every_format
def test_zeros_among_large_values_and_values_beyond_all_others_are_fine(form):
    """Never NaN, and never further off than the largest of them."""
    for values in ([0.0, 5.0, 0.0, -5.0], [1e-45, LARGEST], [LARGEST, -LARGEST, 1.0], [1e-45, -1e-40, 0.0], [1.0, 1e9]):
        decoded = rounded(form, floats(values))
        assert torch.isfinite(decoded).all()
        assert ((decoded - floats(values)).abs() <= max(map(abs, values))).all()


@every_format
def test_blocks_do_not_disturb_each_other(form):
    """Nor do stretches of a block that have scales of their own."""
    parts = [selected("cubes")[:PER_SCALE], 1e6 * selected("gauss")[:PER_SCALE], 1e-6 * selected("laplace")[:7]]
    alone = torch.cat([rounded(form, part) for part in parts])
    assert torch.equal(rounded(form, torch.cat(parts)), alone)
    assert torch.equal(rounded(form, torch.cat(parts), [PER_SCALE, 0, PER_SCALE, 7]), alone)
    assert torch.equal(rounded(form, torch.cat(parts), [2 * PER_SCALE, 7, 0]), alone)


@every_format
@given(seed=seeds, count=st.integers(1, PER_SCALE))
@tries(50)
def test_the_order_of_values_changes_no_scale(form, seed, count):
    """Sums are exact: whoever adds in another order, on another device, finds the same levels to the last bit."""
    values = selected("cubes", seed=7)[:count]
    turned = values[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    expected, found = (form.encode(each, ints([count]))[1] for each in (values, turned))
    assert torch.equal(found, expected)


# --- what is lost ------------------------------------------------------------------------------------------------


def least(magnitudes, many):
    """What the best levels lose: Lloyd's iteration, from quantiles on."""
    magnitudes = magnitudes.double()
    levels = magnitudes.quantile((torch.arange(many) + 0.5).double() / many)
    for _ in range(300):
        nearest = torch.bucketize(magnitudes, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros(many).double().index_add_(0, nearest, magnitudes)
        levels = sums / torch.bincount(nearest, minlength=many)
    return lost(magnitudes, levels[torch.bucketize(magnitudes, (levels[1:] + levels[:-1]) / 2)])


@every_format
@pytest.mark.parametrize("kind", ["gauss", "laplace", "cubes"])
def test_the_error_is_close_to_the_least_that_so_many_levels_can_have(form, kind):
    """With one level and two it is that of means; the levels of 4 bits, which two numbers must tell, cost more."""
    values = selected(kind)
    assert lost(values, rounded(form, values)) < (1.15 if form.levels > 2 else 1.05) * least(values.abs(), form.levels)


@pytest.mark.parametrize("kind", ["gauss", "laplace", "cubes"])
def test_each_bit_tells(kind):
    """On values as they are selected, 4 bits lose less than 1 in 200, 2 less than 1 in 20, and 1 less than 1 in 8."""
    errors = [lost(selected(kind), rounded(form, selected(kind))) for form in FORMATS]
    assert errors[0] < 1 / 200 and errors[1] < 1 / 20 and errors[2] < 1 / 8
    assert 8 * errors[0] < errors[1] < errors[2] / 2


def test_levels_that_follow_layers_lose_less_than_those_of_a_whole_block():
    """Parts of a model differ in size; a scale serves few enough entries to lie in one part."""
    values = torch.cat([scale * selected("cubes")[:PER_SCALE] for scale in (1.0, 3.0, 10.0)])
    mixed = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    for form in FORMATS:
        assert lost(values, rounded(form, values)) < 0.75 * lost(mixed, rounded(form, mixed))


# --- how many bits -----------------------------------------------------------------------------------------------


def entries_of(lengths, counts, seed=0):
    random = np.random.default_rng(seed)
    shape = zip(lengths, counts, strict=True)
    places = [np.sort(random.choice(length, count, replace=False)) for length, count in shape]
    values = selected("cubes", length=100 * sum(counts) + 100)[: sum(counts)]
    indices = torch.from_numpy(np.concatenate(places).astype(np.int32))
    return SparseBlocks(np.arange(len(counts)), ints(counts), indices, values)


@every_format
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("count", [1000, 1400, 1401, 2801, 4000, 20_000])
def test_a_frame_takes_little_more_than_its_codes_and_the_entropy_of_its_indices(form, blocks, count):
    """Less than 0.15 bits per entry at 1 %: header, counts, scales, and the 0.03 by which Rice codes are longer."""
    lengths, counts = ints([100 * count] * blocks), ints([count] * blocks)
    codec = Codec(form, "rice", COMPILED)
    sizes = [codec.pack(codec.code(entries_of(lengths, counts, seed)), lengths, counts).size for seed in range(3)]
    needed = form.bits + index_bits(count, 100 * count) / count
    assert needed < 8 * np.mean(sizes) / (blocks * count) < needed + 0.15


@every_format
@pytest.mark.parametrize("count,scales", [(0, 1), (1, 1), (1400, 1), (1401, 2), (2800, 2), (2801, 3)])
def test_a_block_has_a_scale_for_every_1400_entries_and_at_least_one(form, count, scales):
    assert form.scale_counts(ints([count, 0])).tolist() == [scales, 1]
    assert len(form.encode(torch.ones(count), ints([count, 0]))[1]) == form.scales_of(ints([count, 0])) == scales + 1
    assert vector.size(count, form) == 1 + 4 * scales + form.size(count)


# --- blocks with several scales, in frames -----------------------------------------------------------------------

LENGTHS, COUNTS = ints([6000, 5000, 10, 4000]), ints([3000, 0, 3, 1401])


@every_format
@pytest.mark.parametrize("indices", ["rice", "raw"])
def test_blocks_take_their_scales_along(form, indices):
    """Split, joined in another order and sent on, they decode to the same values; on either kernels."""
    codec = Codec(form, indices, COMPILED)
    coded = codec.code(entries_of(LENGTHS, COUNTS))
    frame = codec.pack(coded, LENGTHS, COUNTS)
    received = codec.unpack(frame, coded.ids, LENGTHS, COUNTS, PEER)
    assert [len(piece.scales) for piece in received.split()] == [3, 1, 1, 2]
    turned = CodedBlocks.join(received.split()[::-1])
    backwards = LENGTHS[::-1].copy(), COUNTS[::-1].copy()
    onward = codec.unpack(codec.pack(turned, *backwards), turned.ids, *backwards, PEER)
    back = CodedBlocks.join(onward.split()[::-1])
    assert np.array_equal(codec.pack(back, LENGTHS, COUNTS), frame)
    assert torch.equal(back.decode().values, coded.decode().values)
    twin = Codec(form, indices, PORTABLE)
    assert np.array_equal(twin.pack(twin.code(entries_of(LENGTHS, COUNTS)), LENGTHS, COUNTS).numpy(), frame)
    other = twin.unpack(torch.from_numpy(frame), coded.ids, LENGTHS, COUNTS, PEER)
    assert torch.equal(other.decode().values, coded.decode().values)


@every_format
@pytest.mark.parametrize("kernels", [COMPILED, PORTABLE], ids=["compiled", "torch"])
@pytest.mark.parametrize("which", [0, 2, -1])
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused_whichever_it_is(form, kernels, which, scale):
    """By verdict, before anything is decoded."""
    codec = Codec(form, "rice", kernels)
    coded = codec.code(entries_of(LENGTHS, COUNTS))
    coded.scales[which] = scale
    frame = codec.pack(coded, LENGTHS, COUNTS)
    with pytest.raises(ProtocolError, match=f"^rank {PEER} sent a value that is not finite") as caught:
        codec.unpack(frame, coded.ids, LENGTHS, COUNTS, PEER)
    assert caught.value.peer == PEER


@every_format
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_vector_with_a_scale_that_is_not_finite_is_refused(form, scale):
    frame, _ = vector.pack(torch.ones(2000), form, COMPILED)
    frame[5:9] = floats([scale]).view(torch.uint8)
    with pytest.raises(ProtocolError, match=f"rank {PEER} sent a value that is not finite"):
        vector.unpack(frame, 2000, form, COMPILED, PEER)


@every_format
@pytest.mark.parametrize("kernels", [COMPILED, PORTABLE], ids=["compiled", "torch"])
def test_a_count_that_needs_more_scales_than_there_are_bytes_is_refused(form, kernels):
    codec = Codec(form, "rice", kernels)
    coded = codec.code(entries_of([4000], [10]))
    frame = codec.pack(coded, ints([4000]), ints([3000]))
    frame[9] = 2560 // 256  # of the count's two bytes the higher
    with pytest.raises(ProtocolError, match="too few bytes for its values and indices"):
        codec.unpack(frame, coded.ids, ints([4000]), ints([3000]), PEER)


# --- the same bytes everywhere -----------------------------------------------------------------------------------

FRAMES = {"int4": "356b5899b7792a30", "int2": "b6c14d35334be035", "int1": "f0f7cef937db214f"}


@pytest.mark.parametrize("kernels", [COMPILED, PORTABLE], ids=["compiled", "torch"])
@every_format
def test_frames_keep_their_bytes(form, kernels):
    """Ranks that hold the same entries code them alike, whatever machine they are; another sum is another format."""
    steps = np.arange(3000, dtype=np.int64)
    values = torch.from_numpy(np.ldexp((steps * 7919 % 2003 - 1001) / 64, steps * 31 % 5).astype(np.float32))
    places = torch.from_numpy((3 * steps).astype(np.int32))
    codec = Codec(form, "rice", kernels)
    coded = codec.code(SparseBlocks(np.arange(1), ints([3000]), places, values))
    frame = codec.pack(coded, ints([9000]), ints([3000]))
    assert hashlib.sha256(np.asarray(frame).tobytes()).hexdigest()[:16] == FRAMES[form.name]
