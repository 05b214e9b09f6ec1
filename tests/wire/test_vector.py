"""Values without indices: what was packed comes back, and a message of another size is refused, naming the sender."""

import pytest
import torch

from formats import NARROW
from spardl.collectives.methods.dense import halving_doubling_all_reduce, ring_all_reduce
from spardl.collectives.program import Team
from spardl.errors import ProtocolError
from spardl.kernels import for_device
from spardl.memory.layout import BlockLayout
from spardl.wire import vector
from stores import Store

FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "int1", *NARROW)
KERNELS = for_device(torch.device("cpu"))
every_format = pytest.mark.parametrize("form", FORMATS)


@every_format
@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_what_was_packed_is_what_the_sender_computes_with(form, count):
    frame, seen = vector.pack(torch.linspace(-3, 5, count), form, KERNELS)
    assert frame.numel() == vector.size(count, form)
    assert torch.equal(vector.unpack(frame, count, form, KERNELS, peer=3), seen)


@every_format
def test_frames_that_travelled_together_come_apart(form):
    frames = [vector.pack(torch.ones(count), form, KERNELS)[0] for count in (2, 0, 5)]
    pieces = vector.split(torch.cat(frames), [2, 0, 5], form, peer=3)
    assert all(torch.equal(piece, frame) for piece, frame in zip(pieces, frames, strict=True))


@every_format
@pytest.mark.parametrize("size", [0, 5, 1000])
def test_a_message_of_another_size_is_refused(form, size):
    frame = torch.ones(size, dtype=torch.uint8)
    for refuse in (
        lambda: vector.unpack(frame, 3, form, KERNELS, peer=3),
        lambda: vector.split(frame, [3, 4], form, peer=3),
        lambda: vector.floats(frame, 3, peer=3),
    ):
        with pytest.raises(ProtocolError, match="rank 3 sent something other than") as caught:
            refuse()
        assert caught.value.peer == 3


@pytest.mark.parametrize("all_reduce", [ring_all_reduce, halving_doubling_all_reduce])
@pytest.mark.parametrize("position", range(3))
def test_dense_sums_refuse_a_peer_that_sends_too_little(all_reduce, position):
    """Every round of every member, the last one included."""
    honest = run_until(all_reduce, position, turns=99)
    for turn in range(honest):
        with pytest.raises(ProtocolError, match="something other than"):
            run_until(all_reduce, position, turns=turn)


def run_until(all_reduce, position, turns):
    """Answer so many rounds that receive with zeros of the right size, and the next one with three bytes."""
    frames = Store(BlockLayout.contiguous(10, 1)).memory.frames
    program = all_reduce(Team((0, 1, 2), position), frames, torch.ones(10))
    heard, answers = 0, None
    try:
        while True:
            operation = program.send(answers)
            sizes = [size if heard < turns else 3 for _, size in operation.receive]
            heard += bool(sizes)
            answers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    except StopIteration:
        return heard
