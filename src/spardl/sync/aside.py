"""A stream beside the caller's: selections and exchanges are queued there, while backward goes on in its own.

A device works off each stream in order, and different ones side by side. Two rules keep results right. What is queued
here begins when all that the caller has queued so far is done, so that gradients are there. And the caller's stream
goes on, once a step is over, when all that was queued here is done, so that results are there. Memory needs no rule of
its own: what one side frees the other can only have been given after one of these waits.
"""

import contextlib
from collections.abc import Iterator

import torch

from spardl.host import has_streams, queueing_on


class Aside:
    """The stream beside the caller's on one device; nothing where a device has no streams, as a CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if has_streams(device) else None
        self._caller: torch.Stream | None = None

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """What is queued inside goes to the stream beside, behind what the caller has queued so far."""
        if self._stream is None:
            yield
            return
        self._caller = torch.accelerator.current_stream(self._device)
        self._stream.wait_event(self._caller.record_event())
        with queueing_on(self._stream, self._caller):
            yield

    def join(self) -> None:
        """What the caller queues from now on waits for all that was queued beside."""
        if self._stream is not None and self._caller is not None:
            self._caller.wait_event(self._stream.record_event())
