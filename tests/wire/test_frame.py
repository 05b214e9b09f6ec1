"""Frames: what was packed comes back, in the bytes promised, and nothing that came over the network is trusted."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effort import tries
from formats import NARROW
from spardl.errors import ProtocolError
from spardl.kernels import for_device
from spardl.kernels.torch import TorchKernels
from spardl.sparse import SparseBlocks
from spardl.wire import format as wire
from spardl.wire.format import VALUE_FORMATS
from spardl.wire.frame import Codec, CodedBlocks

COMPILED, PORTABLE = for_device(torch.device("cpu")), TorchKernels()
FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "int1")
EVERY_FORMAT = [*VALUE_FORMATS.values(), *NARROW]
LEVELS = [VALUE_FORMATS[name] for name in ("int4", "int2", "int1")]
CODECS = [Codec(values, indices, COMPILED) for values in EVERY_FORMAT for indices in ("rice", "raw")]
CODECS += [Codec(values, "fixed", COMPILED) for values in ("bf16", "int4", "none")]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=[f"{c.values}-{c.indices}" for c in CODECS])
seeds = st.integers(0, 2**32 - 1)
PEER = 3


def ints(values):
    return np.array(values, dtype=np.int64)


def random_blocks(lengths, counts, seed, kind="random"):
    """Sorted indices and heavy-tailed values for each block."""
    random = np.random.default_rng(seed)
    parts = [np.int64([])]
    for length, count in zip(lengths, counts, strict=True):
        if kind == "last":
            parts.append(np.arange(length - count, length))
        elif kind == "lone":
            parts.append(np.append(np.arange(count - 1), length - 1) if count else np.arange(0))
        else:
            parts.append(np.sort(random.choice(length, count, replace=False)))
    indices = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    values = torch.from_numpy(random.standard_normal(len(indices)).astype(np.float32) ** 3)
    return SparseBlocks(np.arange(len(lengths)), ints(counts), indices, values)


@st.composite
def shapes(draw):
    """Lengths, budgets, some of them larger than their block, and counts within both, for some blocks."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 9, 100, 255, 256, 1000, 3000]), max_size=5))
    budgets = [int(length * draw(st.floats(0, 1.1))) for length in lengths]
    counts = [draw(st.integers(0, min(budget, length))) for budget, length in zip(budgets, lengths, strict=True)]
    return ints(lengths), ints(budgets), ints(counts)


def assert_same(found, expected):
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.counts.tolist() == expected.counts.tolist()
    assert found.format is expected.format
    for one, other in zip(arrays(found), arrays(expected), strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def arrays(coded):
    return coded.places, coded.codes, coded.scales


@every_codec
@given(shape=shapes(), seed=seeds, kind=st.sampled_from(["random", "last", "lone"]), spare=st.integers(0, 40))
@tries(30)
def test_a_frame_comes_back_and_never_exceeds_its_capacity(codec, shape, seed, kind, spare):
    """Whatever the counts and the support, also out of a larger buffer with garbage behind the frame."""
    lengths, budgets, counts = shape
    entries = random_blocks(lengths, counts, seed, kind)
    coded = codec.code(entries)
    frame = codec.pack(coded, lengths, budgets)
    assert frame.dtype == np.uint8
    assert len(frame) <= codec.capacity(lengths, budgets)
    found = codec.unpack(frame, entries.ids, lengths, budgets, PEER)
    assert_same(found, coded)
    assert torch.equal(found.decode().values, coded.decode().values)
    assert_same(codec.unpack(torch.from_numpy(frame), entries.ids, lengths, budgets, PEER), coded)
    garbage = np.random.default_rng(seed).integers(0, 256, spare).astype(np.uint8)
    assert_same(codec.unpack(np.append(frame, garbage), entries.ids, lengths, budgets, PEER), coded)


@every_codec
def test_a_full_frame_is_as_large_as_its_capacity(codec):
    """Capacity is a promise that is used up: the worst support takes every byte of it."""
    lengths, budgets = ints([64 * 100, 64 * 100]), ints([100, 100])
    entries = random_blocks(lengths, budgets, 0, "last")
    assert codec.pack(codec.code(entries), lengths, budgets).size == codec.capacity(lengths, budgets)


@every_codec
@given(shape=shapes(), seed=seeds)
@tries(30)
def test_forwarded_blocks_keep_their_bits(codec, shape, seed):
    """Unpacked, split, joined in another order, packed, again and again: always the same codes, scales and bytes."""
    lengths, budgets, counts = shape
    coded = codec.code(random_blocks(lengths, counts, seed))
    frame = codec.pack(coded, lengths, budgets)
    received = codec.unpack(frame, coded.ids, lengths, budgets, PEER)
    if not len(lengths):
        return
    assert np.array_equal(codec.pack(CodedBlocks.join(received.split()), lengths, budgets), frame)
    turned = CodedBlocks.join(received.split()[::-1])
    backwards = (lengths[::-1].copy(), budgets[::-1].copy())
    onward = codec.unpack(codec.pack(turned, *backwards), turned.ids, *backwards, PEER)
    assert_same(CodedBlocks.join(onward.split()[::-1]), coded)
    assert torch.equal(CodedBlocks.join(onward.split()[::-1]).decode().values, coded.decode().values)


@pytest.mark.parametrize("length,count", [(10_000, 100), (1_000_000, 10_000)])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("kind", ["random", "last", "lone"])
def test_at_one_percent_and_bf16_an_entry_takes_little_over_24_bits(length, count, blocks, kind):
    """At most 25.5, headers included, for blocks of 10,000 elements as for blocks of 10,000 entries."""
    lengths, counts = ints([length] * blocks), ints([count] * blocks)
    codec = Codec("bf16", "rice", COMPILED)
    frame = codec.pack(codec.code(random_blocks(lengths, counts, 5, kind)), lengths, counts)
    assert 8 * frame.size / (blocks * count) <= 25.5
    assert 8 * codec.capacity(lengths, counts) / (blocks * count) <= 25.5


@every_codec
def test_a_frame_may_hold_no_blocks_or_no_entries(codec):
    for lengths in ([], [0], [5], [5, 0, 7]):
        entries = random_blocks(lengths, [0] * len(lengths), 0)
        frame = codec.pack(codec.code(entries), ints(lengths), ints(lengths))
        assert frame.size <= codec.capacity(ints(lengths), ints(lengths))
        assert len(codec.unpack(frame, entries.ids, ints(lengths), ints(lengths), PEER).places) == 0


@every_codec
@pytest.mark.parametrize("budget", [255, 256, 65535, 65536])
def test_counts_take_the_bytes_that_the_largest_budget_needs(codec, budget):
    lengths, budgets = ints([budget, 9]), ints([budget, 2])
    entries = random_blocks(lengths, budgets, 1)
    frame = codec.pack(codec.code(entries), lengths, budgets)
    assert_same(codec.unpack(frame, entries.ids, lengths, budgets, PEER), codec.code(entries))


def test_a_frame_without_values_holds_indices_and_zeros():
    entries = random_blocks([100, 0, 50], [10, 0, 5], 2)
    lengths, budgets = ints([100, 0, 50]), ints([10, 0, 5])
    bare, full = Codec("none", "rice", COMPILED), Codec("bf16", "rice", COMPILED)
    frame = bare.pack(bare.code(entries), lengths, budgets)
    assert frame.size + 2 * 15 == full.pack(full.code(entries), lengths, budgets).size
    found = bare.unpack(frame, entries.ids, lengths, budgets, PEER).decode()
    assert torch.equal(found.indices, entries.indices)
    assert found.values.tolist() == [0] * 15


# --- poisoned frames ---------------------------------------------------------------------------------------------


@every_codec
def test_a_poisoned_frame_says_so_and_fits(codec):
    lengths, budgets = ints([100, 7]), ints([10, 1])
    empty = codec.code(SparseBlocks.empty(np.arange(2), torch.device("cpu")))
    frame = codec.pack(empty, lengths, budgets, poisoned=True)
    assert frame.size <= codec.capacity(lengths, budgets)
    assert codec.unpack(frame, np.arange(2), lengths, budgets, PEER) is None
    full = np.append(frame, np.full(codec.capacity(lengths, budgets) - frame.size, 255, np.uint8))
    assert codec.unpack(full, np.arange(2), lengths, budgets, PEER) is None


def test_a_poisoned_frame_of_another_version_is_still_refused():
    codec = Codec("bf16", "rice", COMPILED)
    frame = codec.pack(codec.code(random_blocks([9], [0], 0)), ints([9]), ints([1]), poisoned=True)
    frame[0] += 1
    with pytest.raises(ProtocolError):
        codec.unpack(frame, np.arange(1), ints([9]), ints([1]), PEER)


# --- distrust ----------------------------------------------------------------------------------------------------


def check_distrust(codec, frame, lengths, budgets):
    """A frame is either refused with the peer's rank, or decodes to something that is safe to apply."""
    ids = np.arange(len(lengths))
    try:
        found = codec.unpack(frame, ids, lengths, budgets, PEER)
    except ProtocolError as error:
        assert error.peer == PEER
        assert f"rank {PEER} " in str(error)
        return
    if found is None:
        return
    assert (found.counts <= np.minimum(budgets, lengths)).all() and (found.counts >= 0).all()
    entries = found.decode()
    assert torch.isfinite(entries.values).all()
    assert entries.values.numel() == entries.indices.numel() == found.counts.sum()
    assert entries.indices.dtype == torch.int32
    for block, length in zip(entries.indices.split(found.counts.tolist()), lengths, strict=True):
        steps = np.diff(block.numpy().astype(np.int64), prepend=-1)
        assert (steps > 0).all()
        assert not block.numel() or block[-1] < length


@every_codec
@given(
    shape=shapes(),
    seed=seeds,
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    cut=st.none() | st.integers(0, 2**16),
    extra=st.binary(max_size=30),
)
@tries(50)
def test_a_damaged_frame_is_refused_or_harmless(codec, shape, seed, changes, cut, extra):
    """Bytes overwritten, the end cut off, bytes appended."""
    lengths, budgets, counts = shape
    frame = codec.pack(codec.code(random_blocks(lengths, counts, seed)), lengths, budgets).copy()
    for place, byte in changes:
        frame[place % len(frame)] = byte
    if cut is not None:
        frame = frame[: cut % len(frame)]
    check_distrust(codec, np.append(frame, np.frombuffer(extra, np.uint8)), lengths, budgets)


@every_codec
@given(shape=shapes(), body=st.binary(max_size=200), honest=st.booleans())
@tries(50)
def test_random_bytes_are_refused_or_harmless(codec, shape, body, honest):
    """Also behind a header that looks right."""
    lengths, budgets, _ = shape
    if honest:
        length = wire.HEADER.size + len(body)
        body = struct.pack("<BBHI", wire.VERSION, codec._frame.flags, len(lengths), length) + body
    check_distrust(codec, np.frombuffer(body, np.uint8).copy(), lengths, budgets)


def refusal(codec, frame, lengths, budgets):
    with pytest.raises(ProtocolError, match=f"^rank {PEER} sent ") as caught:
        codec.unpack(frame, np.arange(len(lengths)), ints(lengths), ints(budgets), PEER)
    assert caught.value.peer == PEER
    return str(caught.value)


@every_codec
def test_each_mistake_has_its_own_sentence(codec):
    lengths, budgets = [100, 50], [10, 5]
    good = codec.pack(codec.code(random_blocks(lengths, budgets, 0)), ints(lengths), ints(budgets))

    def damaged(place, byte):
        frame = good.copy()
        frame[place] = byte
        return frame

    assert "fewer than a header" in refusal(codec, good[:7], lengths, budgets)
    assert "wire version 9" in refusal(codec, damaged(0, 9), lengths, budgets)
    other_values = int(good[1]) ^ 1
    assert "another value or index format" in refusal(codec, damaged(1, other_values), lengths, budgets)
    assert "another value or index format" in refusal(codec, damaged(1, int(good[1]) | 64), lengths, budgets)
    assert "3 blocks instead of 2" in refusal(codec, damaged(2, 3), lengths, budgets)
    assert "more entries than a block may have" in refusal(codec, damaged(wire.HEADER.size, 11), lengths, budgets)
    assert f"in {good.size - 1}" in refusal(codec, good[:-1], lengths, budgets)
    # The last byte is missing, and the header knows it: too few bits, or too few bytes.
    assert "indices" in refusal(codec, damaged(4, good.size - 1)[:-1], lengths, budgets)


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_refused(values, bad):
    """An honest sender poisons the frame instead."""
    codec = Codec(values, "rice", COMPILED)
    entries = random_blocks([100], [5], 0)
    entries.values[2] = bad
    frame = codec.pack(codec.code(entries), ints([100]), ints([5]))
    assert "not finite" in refusal(codec, frame, [100], [5])


@pytest.mark.parametrize("scale", [3e38, -3e38, 1e37, np.inf, np.nan])
def test_a_scale_that_makes_finite_codes_infinite_is_refused(scale):
    codec = Codec("int8", "rice", COMPILED)
    coded = codec.code(random_blocks([100], [5], 0))
    coded.codes[0] = -128
    coded.scales[0] = scale
    assert "not finite" in refusal(codec, codec.pack(coded, ints([100]), ints([5])), [100], [5])


@pytest.mark.parametrize(
    "indices",
    [
        [1, 1],
        [2, 1],
        [-1, 3],
        [0, 9],
        [0, 2**31 - 1],
        [0, 2**31 - 1, -(2**31), -1, 5],
    ],
    ids=["twice", "descending", "negative", "past the end", "far past the end", "wrapping round in 32 bits"],
)
def test_raw_indices_that_do_not_ascend_within_their_block_are_refused(indices):
    codec = Codec("fp32", "raw", COMPILED)
    count = len(indices)
    entries = SparseBlocks(np.arange(1), ints([count]), torch.tensor(indices, dtype=torch.int32), torch.ones(count))
    frame = codec.pack(codec.code(entries), ints([9]), ints([5]))
    assert "out of order or outside" in refusal(codec, frame, [9], [5])


@pytest.mark.parametrize("indices", ["rice", "fixed"])
@pytest.mark.parametrize("kernels", [COMPILED, PORTABLE], ids=["compiled", "torch"])
def test_coded_indices_take_no_more_than_the_worst_case_and_fixed_ones_all_of_it(indices, kernels):
    """Which is that of Elias and Fano: 2 + log2(length / count) bits at the most."""
    codec = Codec("none", indices, kernels)
    for count in (1, 37, 500, 1000):
        frame = codec.pack(codec.code(random_blocks([1000], [count], count)), ints([1000]), ints([count]))
        assert len(frame) <= codec.capacity(ints([1000]), ints([count]))
        if indices == "fixed":
            assert len(frame) == codec.capacity(ints([1000]), ints([count]))
            bits = 8 * (len(frame) - wire.HEADER.size - (1 if count < 256 else 2))
            assert bits <= count * (2 + np.log2(1000 / count)) + 8


def test_an_index_that_leaves_its_block_is_refused():
    codec = Codec("fp32", "rice", COMPILED)
    frame = codec.pack(codec.code(random_blocks([64], [4], 0, "last")), ints([64]), ints([4]))
    assert len(codec.unpack(frame, np.arange(1), ints([64]), ints([4]), PEER).places) == 4
    assert "outside their block" in refusal(codec, frame, [63], [4])


@every_codec
@given(
    shape=shapes(),
    seed=seeds,
    changes=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=2),
    cut=st.integers(0, 3),
)
@tries(30)
def test_both_kernels_write_the_same_frames_and_judge_them_alike(codec, shape, seed, changes, cut):
    """Whole frames, and frames with a few bytes changed or cut off; also what they decode to."""
    lengths, budgets, counts = shape
    entries = random_blocks(lengths, counts, seed)
    twin = Codec(codec.format, codec.indices, PORTABLE)
    frame = codec.pack(codec.code(entries), lengths, budgets).copy()
    assert np.array_equal(twin.pack(twin.code(entries), lengths, budgets).numpy(), frame)
    assert twin.capacity(lengths, budgets) == codec.capacity(lengths, budgets)

    for place, byte in changes:
        frame[place % frame.size] = byte
    frame = frame[: frame.size - cut]
    assert opened(codec, frame, lengths, budgets) == opened(twin, torch.from_numpy(frame), lengths, budgets)


def opened(codec, frame, lengths, budgets):
    """All that a codec's kernels find in a frame, or why they refuse it."""
    try:
        found = codec.unpack(frame, np.arange(len(lengths)), lengths, budgets, PEER)
    except ProtocolError as error:
        return str(error)
    if found is None:
        return "poisoned"
    parts = (COMPILED.array(part).tobytes() for part in arrays(found))
    return found.counts.tolist(), *parts, found.decode().values.tolist()


# --- formats of less than a byte ---------------------------------------------------------------------------------


def test_narrow_codes_are_packed_over_the_blocks_without_gaps():
    """Three blocks of 3, 0 and 2 entries with four bits: three bytes, the first code lowest, negative ones with their
    sign; and one scale per block in front of them."""
    codec = Codec(NARROW[0], "raw", COMPILED)
    indices, values = torch.tensor([0, 4, 8, 1, 2], dtype=torch.int32), torch.tensor([7.0, -7.0, 2.0, -1.0, 1.0])
    entries = SparseBlocks(np.arange(3), ints([3, 0, 2]), indices, values)
    lengths = budgets = ints([9, 9, 9])
    frame = codec.pack(codec.code(entries), lengths, budgets)
    scales, at = np.float32([1, 0, 1 / 7]).tobytes(), wire.HEADER.size + 3
    assert frame[at : at + 12].tobytes() == scales
    assert frame[at + 12 : at + 15].tolist() == [0x97, 0x92, 0x07], "7, -7 | 2, -7 | 7"
    assert frame.size == at + 12 + 3 + 4 * 5
    found = codec.unpack(frame, entries.ids, lengths, budgets, PEER)
    assert found.codes.tolist() == [7, -7, 2, -7, 7]
    assert torch.allclose(found.decode().values, values)


@pytest.mark.parametrize("form", [*NARROW, *LEVELS], ids=lambda form: form.name)
@pytest.mark.parametrize("indices", ["rice", "fixed", "raw"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
def test_a_narrow_frame_has_the_size_that_its_bits_say(form, indices, count):
    """Compared with a frame that has no values."""
    narrow, bare = Codec(form, indices, COMPILED), Codec("none", indices, COMPILED)
    entries, lengths, budgets = random_blocks([1000], [count], 3), ints([1000]), ints([100])
    sizes = [codec.pack(codec.code(entries), lengths, budgets).size for codec in (narrow, bare)]
    scale = 4 if form.scaled else 0
    assert sizes[0] - sizes[1] == scale + -(-count * form.bits // 8)
    assert narrow.capacity(lengths, budgets) - bare.capacity(lengths, budgets) == scale + -(-100 * form.bits // 8)


def test_what_is_left_of_the_last_byte_of_narrow_codes_does_not_matter():
    """It is written as zero. A frame with other bits there decodes to the same entries."""
    codec = Codec(NARROW[0], "raw", COMPILED)
    lengths, budgets = ints([100]), ints([5])
    coded = codec.code(random_blocks([100], [5], 0))
    frame = codec.pack(coded, lengths, budgets)
    last = wire.HEADER.size + 1 + 4 + 2
    assert frame[last] >> 4 == 0
    frame[last] |= 0xF0
    assert_same(codec.unpack(frame, np.arange(1), lengths, budgets, PEER), coded)
