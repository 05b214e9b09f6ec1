"""Messages with a sum of their own, for those who trust neither memory nor cards nor cables (`paranoid`).

TCP's checksum has 16 bits, and is gone before a message reaches memory. Here the sender puts a length and a CRC-32
before every message of a round, and what arrives with another one is refused, in the sender's name.
"""

import dataclasses
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from spardl.collectives.program import Message, Round
from spardl.errors import ProtocolError
from spardl.host import download, upload
from spardl.sparse import Array

_SUM = struct.Struct("<II")  # length, CRC-32


def sealed(operation: Round) -> Round:
    """The same round, with a sum before each message. A copy of each, and a pass over it."""
    send = [Message(peer, _seal(frame), capacity + _SUM.size) for peer, frame, capacity in operation.send]
    receive = [(peer, capacity + _SUM.size) for peer, capacity in operation.receive]
    return dataclasses.replace(operation, send=send, receive=receive)


def opened(operation: Round, frames: list[Any], who: Callable[[int], str]) -> list[Any]:
    """What arrived of a round that was sealed, without the sums.

    Raises:
        ProtocolError: a message is not what its sender has sent.
    """
    return [_open(frame, peer, who, operation.name) for frame, (peer, _) in zip(frames, operation.receive, strict=True)]


def _seal(frame: Array) -> Array:
    content = download(frame) if isinstance(frame, Tensor) else frame
    head = np.frombuffer(_SUM.pack(content.size, zlib.crc32(content.tobytes())), np.uint8)
    whole = np.concatenate((head, content))
    return upload(whole, frame.device) if isinstance(frame, Tensor) else whole


def _open(frame: Any, peer: int, who: Callable[[int], str], name: str) -> Any:
    content = download(frame) if isinstance(frame, Tensor) else frame
    if content.size >= _SUM.size:
        length, found = _SUM.unpack(content[: _SUM.size].tobytes())
        payload = content[_SUM.size : _SUM.size + length]
        if payload.size == length and zlib.crc32(payload.tobytes()) == found:
            return frame[_SUM.size : _SUM.size + length]
    raise ProtocolError(
        f"a message of {who(peer)} in {name} is not what was sent: its checksum differs. Nothing of it was applied;"
        " memory, network card or line of one of the two hosts is faulty.",
        peer=peer,
    )
