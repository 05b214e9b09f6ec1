"""The usual round, one message out and one message in, as one compiled call without Python in between.

It makes the system calls itself, on lines that block. Whatever is unusual ends it early: a full line, a signal, silence
for the timeout, a peer that left. How far it came is in the records, and `link.py` goes on from there.
"""

import math
import select
import socket
from typing import Any

import numpy as np
from numba import njit
from numba.core import types

HEADER = 16  # bytes: the length of the payload; the mark of the round, with the number of the message on its line
NUMBERS = 0xFFFFFFFF

# A record is the memory of one line in 64-bit words, some of them as the system calls read them on 64-bit Linux.
OUT = 0  # the header that leaves
IN = 2  # the header that arrives
_VECTOR = 4  # two struct iovec: that header, and a payload
_MESSAGE = 8  # a struct msghdr that consists of them
SENT = 15  # bytes that have left, if not all
HEARD = 16  # bytes that have arrived of the header, or of the payload, if not all
_CLOCK = 17  # a struct timespec
SENDING = 19  # number of the message that leaves next
AWAITED = 20  # number of the message that arrives next
_ENOUGH = 21  # an int: how many bytes end a wait
_POLL = 22  # a struct pollfd
_PATIENCE = 23  # milliseconds that a wait may take
_WORDS = 24

# How a call ends: with the length of the payload that has arrived, or with one of these.
UNSENT, UNHEARD, UNEXPECTED, UNFINISHED = -1, -2, -3, -4

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


def record(line: int, timeout: float) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The record of the line with this descriptor, on which a wait may take so many seconds."""
    words = np.zeros(_WORDS, np.int64)
    address = words.ctypes.data
    words[_VECTOR], words[_VECTOR + 1] = address + 8 * OUT, HEADER
    words[_MESSAGE + 2], words[_MESSAGE + 3] = address + 8 * _VECTOR, 2
    words[_POLL : _POLL + 1].view(np.int32)[0] = line
    words[_POLL : _POLL + 1].view(np.int16)[2] = select.POLLIN
    words[_PATIENCE] = min(math.ceil(1000 * timeout), (1 << 31) - 1)
    return words


@_compiled
def _wake_at(line, record, size):  # type: ignore[no-untyped-def]
    """Let waits on this line end when so many bytes are there, or at its end."""
    place = record[_ENOUGH:].view(np.int32)
    place[0] = size
    _setsockopt(line, _SOCKET, _LOW_MARK, place.ctypes.data, 4)


@_compiled
def _receive(line, record, address, length):  # type: ignore[no-untyped-def]
    """Wait for so many bytes; how many came.

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
        _poll(record.ctypes.data + 8 * _POLL, 1, record[_PATIENCE])
        got = _recv(line, address + done, piece, _NOW)
        done += max(0, got)
        if got != piece:
            break
    _wake_at(line, record, 1)
    return done


def _exchange(mark, to, out, payload, source, into, buffer, looks):  # type: ignore[no-untyped-def]
    """Send `payload` on line `to`; receive one into `buffer` on line `source`.

    `out` and `into` are the lines' records. Looks for the answer so many times before it lets the core go. Returns how
    it ended, and for how many seconds the answer was waited for.
    """
    base, size = into.ctypes.data, payload.size
    out[OUT], out[OUT + 1] = size, mark | out[SENDING]
    out[_VECTOR + 2], out[_VECTOR + 3] = payload.ctypes.data, size
    out[SENDING] = (out[SENDING] + 1) & NUMBERS
    out[SENT] = _sendmsg(to, out.ctypes.data + 8 * _MESSAGE, _AT_ONCE)
    if out[SENT] != HEADER + size:
        return UNSENT, 0.0
    _clock_gettime(_MONOTONIC, base + 8 * _CLOCK)
    before = 1_000_000_000 * into[_CLOCK] + into[_CLOCK + 1]
    into[HEARD] = -1
    while looks > 0 and into[HEARD] < 0:
        into[HEARD] = _recv(source, base + 8 * IN, HEADER, _NOW)
        looks -= 1
    if into[HEARD] < 0:
        into[HEARD] = _recv(source, base + 8 * IN, HEADER, _WHOLE)
    _clock_gettime(_MONOTONIC, base + 8 * _CLOCK)
    waited = 1e-9 * (1_000_000_000 * into[_CLOCK] + into[_CLOCK + 1] - before)
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
