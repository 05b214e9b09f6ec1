"""Signals that ask a run to stop, noted for when it can."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], int]]:
    """Inside, these signals interrupt nothing; the function says which one has come last, or 0."""
    came = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = number

    before = {number: signal.signal(number, note) for number in STOPPING}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
