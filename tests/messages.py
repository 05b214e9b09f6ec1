"""Messages for rounds that tests write by hand."""

from spardl.collectives.program import Message
from spardl.sparse import Array


def message(peer: int, frame: Array) -> Message:
    """`frame` for `peer`, which expects just as many bytes."""
    return Message(peer, frame, len(frame))
