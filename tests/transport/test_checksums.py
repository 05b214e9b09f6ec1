"""A message that was changed on the way is refused in its sender's name; one that was not is what was sent."""

from typing import Any

import numpy as np
import pytest
import torch

from messages import message
from processes import on_processes
from spardl.collectives.program import Round
from spardl.errors import ProtocolError
from spardl.transport import checksums
from spardl.transport.direct import DirectTransport
from spardl.transport.torchdist import TorchTransport


def passed(frame: Any, capacity: int) -> Any:
    """Sealed by one rank and opened by another, which had room for `capacity` bytes."""
    sent = checksums.sealed(Round([message(1, frame)], [], "test")).send[0]
    asked = checksums.sealed(Round([], [(0, capacity)], "test")).receive[0]
    padded = np.zeros(asked[1], np.uint8)
    padded[: len(sent.frame)] = sent.frame
    (found,) = checksums.opened(Round([], [(0, capacity)], "test"), [padded], str)
    return found


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_what_was_sealed_is_opened_also_where_it_was_filled_up(size: int) -> None:
    frame = np.arange(size).astype(np.uint8)
    assert (passed(frame, size) == frame).all()
    assert (passed(frame, size + 99) == frame).all()
    tensor = torch.from_numpy(frame)
    assert isinstance(checksums._seal(tensor), torch.Tensor)


def test_any_bit_that_was_changed_is_noticed() -> None:
    frame = np.arange(20).astype(np.uint8)
    (sent,) = checksums.sealed(Round([message(1, frame)], [], "test")).send
    for place in range(8 * len(sent.frame)):
        changed = sent.frame.copy()
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(ProtocolError, match="a message of rank 0 in test is not what was sent") as caught:
            checksums.opened(Round([], [(0, 20)], "test"), [changed], lambda peer: f"rank {peer}")
        assert caught.value.peer == 0


def swap(rank: int, workers: int, kind: type, faulty: int | None) -> Any:
    transport = kind(timeout=30)
    transport.checks = True
    to, source = (rank + 1) % workers, (rank - 1) % workers
    if rank == faulty:
        sealed = checksums.sealed

        def bent(operation: Round) -> Round:
            found = sealed(operation)
            found.send[0].frame[20] ^= 4
            return found

        checksums.sealed = bent
    frame = np.full(100, rank, np.uint8)
    try:
        (arrived,) = transport.perform(Round([message(to, frame)], [(source, 100)], "swap"))
        return bool((torch.as_tensor(arrived) == source).all())
    except ProtocolError as error:
        return error.peer, str(error)


@pytest.mark.parametrize("kind", [DirectTransport, TorchTransport])
def test_the_sender_of_a_message_that_was_changed_is_named(kind: type) -> None:
    assert on_processes(3, swap, kind, None) == [True, True, True]
    found = on_processes(3, swap, kind, 1)
    assert found[:2] == [True, True]
    peer, text = found[2]
    assert peer == 1 and "checksum differs" in text
