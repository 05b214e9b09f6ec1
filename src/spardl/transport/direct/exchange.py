"""The usual round, one message out and one message in, as one compiled call without Python in between.

It makes the system calls itself, on lines that block, with arguments laid out as 64-bit Linux has them. Whatever is
unusual ends it early: a full line, a signal, silence for the timeout, a peer that left. How far it came is in the
records, and `link.py` goes on from there. Elsewhere `link.py` does it all.
"""

import socket
from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from spardl.transport.direct.record import (
    AWAITED,
    CLOCK,
    ENOUGH,
    HEADER,
    HEARD,
    IN,
    MESSAGE,
    NUMBERS,
    OUT,
    PATIENCE,
    POLL,
    SENDING,
    SENT,
    UNEXPECTED,
    UNFINISHED,
    UNHEARD,
    UNSENT,
    VECTOR,
)

_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_NOW = int(socket.MSG_DONTWAIT)
_WHOLE = int(socket.MSG_WAITALL)
_MONOTONIC = 1
_SOCKET, _LOW_MARK = int(socket.SOL_SOCKET), int(socket.SO_RCVLOWAT)

# A payload that is not short is waited for in pieces. Left to itself, the system wakes the receiver for every packet,
# and where ranks share cores that takes the core from one that had a use for it.
_SHORT, _PIECE = 1 << 13, 1 << 16

# Typed as anything: outside of compiled code they cannot be called.
_sendmsg: Any = types.ExternalFunction("sendmsg", types.int64(types.int32, types.intp, types.int32))
_recv: Any = types.ExternalFunction("recv", types.int64(types.int32, types.intp, types.int64, types.int32))
_poll: Any = types.ExternalFunction("poll", types.int32(types.intp, types.uint64, types.int32))
_setsockopt: Any = types.ExternalFunction(
    "setsockopt", types.int32(types.int32, types.int32, types.int32, types.intp, types.int32)
)
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


_compiled: Any = njit(cache=True, nogil=True, boundscheck=False)


@_compiled
def _wake_at(line, record, size):  # type: ignore[no-untyped-def]
    """Let waits on this line end when `size` bytes are there, or at its end."""
    place = record[ENOUGH:].view(np.int32)
    place[0] = size
    _setsockopt(line, _SOCKET, _LOW_MARK, place.ctypes.data, 4)


@_compiled
def _receive(line, record, address, length):  # type: ignore[no-untyped-def]
    """Wait for `length` bytes; how many came.

    Nothing is taken before a piece is there as a whole: what is left of it would be too little to end the wait.
    """
    if length <= _SHORT:
        return max(0, _recv(line, address, length, _WHOLE) if length else 0)
    done, enough = 0, 1
    while done < length:
        piece = min(length - done, _PIECE)
        if piece != enough:
            enough = piece
            _wake_at(line, record, enough)
        _poll(record.ctypes.data + 8 * POLL, 1, record[PATIENCE])
        got = _recv(line, address + done, piece, _NOW)
        done += max(0, got)
        if got != piece:
            break
    _wake_at(line, record, 1)
    return done


def _exchange(mark, to, out, payload, source, into, buffer, looks):  # type: ignore[no-untyped-def]
    """Send `payload` on line `to`; receive one into `buffer` on line `source`.

    `out` and `into` are the lines' records. Looks for the answer `looks` times before it lets the core go. Returns how
    it ended, and for how many seconds the answer was waited for.
    """
    base, size = into.ctypes.data, payload.size
    out[OUT], out[OUT + 1] = size, mark | out[SENDING]
    out[VECTOR + 2], out[VECTOR + 3] = payload.ctypes.data, size
    out[SENDING] = (out[SENDING] + 1) & NUMBERS
    out[SENT] = _sendmsg(to, out.ctypes.data + 8 * MESSAGE, _AT_ONCE)
    if out[SENT] != HEADER + size:
        return UNSENT, 0.0
    _clock_gettime(_MONOTONIC, base + 8 * CLOCK)
    before = 1_000_000_000 * into[CLOCK] + into[CLOCK + 1]
    into[HEARD] = -1
    while looks > 0 and into[HEARD] < 0:
        into[HEARD] = _recv(source, base + 8 * IN, HEADER, _NOW)
        looks -= 1
    if into[HEARD] < 0:
        into[HEARD] = _recv(source, base + 8 * IN, HEADER, _WHOLE)
    _clock_gettime(_MONOTONIC, base + 8 * CLOCK)
    waited = 1e-9 * (1_000_000_000 * into[CLOCK] + into[CLOCK + 1] - before)
    if into[HEARD] != HEADER:
        return UNHEARD, waited
    length = into[IN]
    if into[IN + 1] != mark | into[AWAITED] or length < 0 or length > buffer.size:
        return UNEXPECTED, waited
    into[AWAITED] = (into[AWAITED] + 1) & NUMBERS
    into[HEARD] = _receive(source, into, buffer.ctypes.data, length)
    return (length if into[HEARD] == length else UNFINISHED), waited


exchange = njit(
    "Tuple((int64, float64))(int64, int64, int64[::1], uint8[::1], int64, int64[::1], uint8[::1], int64)",
    cache=True,
    nogil=True,
    boundscheck=False,
)(_exchange)
