"""Kernels that fill: counts that the host knows beforehand, at the price of zeros, and sums that stay what they are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.errors import ProtocolError
from spardl.kernels.api import CodedEntries
from spardl.kernels.torch import TorchKernels
from spardl.memory.health import Health
from spardl.wire import format as wire
from spardl.wire.format import VALUE_FORMATS, FrameFormat
from spardl.wire.frame import Codec, CodedBlocks

FILLING, COUNTING = TorchKernels(fills=True), TorchKernels()
SPARSE = torch.tensor([0.0, 3.0, 0.0, -5.0, 0.0, 1.0, 0.0, 0.0])
PEER = 3


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_a_selection_has_as_many_entries_as_its_budget_says() -> None:
    """Two blocks of four; the first has two entries that are not zero, the second one."""
    memory = SPARSE.clone()
    counts, places, values = FILLING.take_largest(memory, ints(0, 4), ints(4, 8), ints(3, 9))
    assert counts.tolist() == [3, 4]
    assert places.tolist() == [0, 1, 3, 0, 1, 2, 3]
    assert values.tolist() == [0, 3, -5, 0, 1, 0, 0]
    assert not memory.any()


def test_where_there_are_enough_entries_nothing_is_different() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(1))
    mine, theirs = values.clone(), values.clone()
    blocks = (ints(0, 200), ints(200, 500), ints(7, 30))
    for one, other in zip(FILLING.take_rounded(mine, *blocks), COUNTING.take_rounded(theirs, *blocks), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_taken_first_and_leads_nowhere_else(broken: float) -> None:
    """The step will be rolled back, but until the host knows, every index must be one of its block."""
    memory = torch.ones(50)
    memory[17] = memory[40] = broken
    counts, places, _, fine = FILLING.take_rounded(memory, ints(0), ints(50), ints(3))
    assert counts.tolist() == [3] and places.tolist() == [0, 17, 40]
    assert not fine


def entries(length: int) -> st.SearchStrategy[dict[int, float]]:
    numbers = st.sampled_from([0.0, 1.0, -1.0, 2.5, -3.25])
    return st.dictionaries(st.integers(0, length - 1), numbers, max_size=length)


def as_tensors(found: dict[int, float]) -> tuple[Tensor, Tensor]:
    places = sorted(found)
    return torch.tensor(places, dtype=torch.int32), torch.tensor([found[place] for place in places])


def dense(places: Tensor, values: Tensor, length: int) -> Tensor:
    return torch.zeros(length).index_add_(0, places.long(), values)


@given(st.integers(1, 12).flatmap(lambda length: st.tuples(st.just(length), entries(length), entries(length))))
def test_a_sum_has_as_many_entries_as_it_was_given_or_as_its_block_is_long(
    case: tuple[int, dict[int, float], dict[int, float]],
) -> None:
    length, left, right = case
    places, values = FILLING.merge(*as_tensors(left), *as_tensors(right), length)
    assert len(places) == len(values) == min(length, len(left) + len(right))
    assert torch.equal(places, places.unique()) and all(0 <= place < length for place in places.tolist())
    expected = dense(*as_tensors(left), length) + dense(*as_tensors(right), length)
    assert torch.equal(dense(places, values, length), expected)


def test_a_cut_keeps_as_many_as_it_may_and_leaves_the_others() -> None:
    places, values = torch.arange(5).int(), torch.tensor([0.0, -2.0, 0.0, 1.0, 0.0])
    kept, others = FILLING.part_largest(places, values, 3)
    assert kept[0].tolist() == [0, 1, 3] and kept[1].tolist() == [0, -2, 1]
    assert others[0].tolist() == [2, 4]


# --- frames whose counts both sides know ------------------------------------------------------------------------------

LENGTHS, COUNTS = ints(300, 1, 64, 900), ints(20, 1, 64, 33)


def a_frame(form: FrameFormat, seed: int, *, poisoned: bool = False) -> tuple[Tensor, CodedEntries[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    places = torch.cat(
        [
            torch.randperm(length, generator=generator)[:count].sort().values
            for length, count in zip(LENGTHS, COUNTS, strict=True)
        ]
    ).int()
    codes, scales = form.values.encode(torch.randn(len(places), generator=generator), COUNTS)
    found = CodedEntries(COUNTS, places, codes, scales)
    return FILLING.write_frame(form, torch.tensor(poisoned), LENGTHS, COUNTS, found), found


FORMS = [
    FrameFormat(VALUE_FORMATS[name], indices)
    for name in ("bf16", "fp32", "int8", "int4", "none")
    for indices in ("rice", "fixed", "raw")
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.values.name}-{form.indices}")
def test_a_full_frame_is_opened_without_a_look_at_it(form: FrameFormat) -> None:
    frame, entries = a_frame(form, 1)
    assert len(frame) == FILLING.frame_room(form, LENGTHS, COUNTS)
    verdict, found = FILLING.read_frame(frame, form, LENGTHS, COUNTS, full=True)
    assert isinstance(verdict, Tensor) and verdict == 0
    for one, other in zip(found[1:], entries[1:], strict=True):
        assert torch.equal(one, other)
    assert FILLING.read_frame(frame, form, LENGTHS, COUNTS)[0] == COUNTS.sum()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.values.name}-{form.indices}")
def test_damaged_frames_are_refused_where_a_look_would_refuse_them(form: FrameFormat) -> None:
    """Whatever is accepted is what `read_frame` would read; of all else no entry but zeros in their blocks is left."""
    frame, _ = a_frame(form, 2)
    generator = torch.Generator().manual_seed(7)
    refused = 0
    for place in [*range(16), *torch.randint(len(frame), (40,), generator=generator).tolist()]:
        damaged = frame.clone()
        damaged[place] ^= int(torch.randint(1, 256, (1,), generator=generator))
        verdict, found = FILLING.read_frame(damaged, form, LENGTHS, COUNTS, full=True)
        looked, expected = FILLING.read_frame(damaged, form, LENGTHS, COUNTS)
        same_counts = expected.counts.tolist() == COUNTS.tolist()
        assert isinstance(verdict, Tensor)
        assert (int(verdict) == 0) == (int(looked) >= 0 and same_counts), f"byte {place}"
        if int(verdict) == 0:
            assert all(torch.equal(one, other) for one, other in zip(found[1:], expected[1:], strict=True))
            continue
        refused += 1
        assert int(verdict) == int(looked) or int(verdict) == wire.OTHER_COUNTS or int(looked) == wire.TOO_SHORT
        assert not found.codes.view(torch.uint8).any() and not found.scales.any()
        bounds = torch.from_numpy(np.repeat(LENGTHS, COUNTS))
        assert ((found.places >= 0) & (found.places < bounds)).all()
    assert refused > 8


def test_a_poisoned_frame_says_so_whatever_it_holds() -> None:
    form = FORMS[0]
    frame, _ = a_frame(form, 3, poisoned=True)
    verdict, found = FILLING.read_frame(frame, form, LENGTHS, COUNTS, full=True)
    assert int(verdict) == wire.POISONED and not found.codes.any()


@pytest.mark.parametrize("size", [0, 7, 40])
def test_a_frame_that_is_too_short_is_refused(size: int) -> None:
    form = FORMS[0]
    frame, _ = a_frame(form, 4)
    verdict, found = FILLING.read_frame(frame[:size], form, LENGTHS, COUNTS, full=True)
    assert int(verdict) == wire.TOO_SHORT and len(found.places) == COUNTS.sum()


def test_a_damaged_frame_is_the_fault_of_its_sender_once_the_verdict_is_read() -> None:
    codec = Codec("bf16", "rice", FILLING)
    frame, _ = a_frame(FORMS[0], 5)
    frame[0] ^= 1
    verdict, blocks = codec.open(frame, np.arange(4), LENGTHS, COUNTS)
    assert isinstance(blocks, CodedBlocks)
    with pytest.raises(ProtocolError, match="rank 3 sent something else than a frame of these blocks") as caught:
        Health().judge(verdict, PEER)  # of a CPU it is read at once
    assert caught.value.peer == PEER
