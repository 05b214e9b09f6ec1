"""The memory of one connection: headers, counters, and what the system calls of the compiled exchange read.

It is an array of 64-bit words, so that compiled code and Python can both use it. `exchange.py` has the numbers below
compiled into it, and is compiled again only when it changes itself.
"""

import math
import select

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]

HEADER = 16  # bytes: two words
NUMBERS = 0xFFFFFFFF  # of a tag: where the number of the message is
FAREWELL = -1  # as a length: the sender gives up, because of the rank in the tag's place

OUT = 0  # the header that leaves
IN = 2  # the header that arrives
VECTOR = 4  # two struct iovec of 64-bit Linux: that header, and a payload
MESSAGE = 8  # a struct msghdr that consists of them
SENT = 15  # bytes that have left, if not all
HEARD = 16  # bytes that have arrived of the header, or of the payload, if not all
CLOCK = 17  # a struct timespec
SENDING = 19  # number of the message that leaves next
AWAITED = 20  # number of the message that arrives next
ENOUGH = 21  # an int: how many bytes end a wait
POLL = 22  # a struct pollfd
PATIENCE = 23  # milliseconds that a wait may take
_WORDS = 24

# How a compiled exchange ends: with the length of the payload that has arrived, or with one of these.
UNSENT, UNHEARD, UNEXPECTED, UNFINISHED = -1, -2, -3, -4


def record(line: int, timeout: float) -> Words:
    """The record of the line with this descriptor, on which a wait may take `timeout` seconds."""
    words = np.zeros(_WORDS, np.int64)
    address = words.ctypes.data
    words[VECTOR], words[VECTOR + 1] = address + 8 * OUT, HEADER
    words[MESSAGE + 2], words[MESSAGE + 3] = address + 8 * VECTOR, 2
    words[POLL : POLL + 1].view(np.int32)[0] = line
    words[POLL : POLL + 1].view(np.int16)[2] = select.POLLIN
    words[PATIENCE] = patience(timeout)
    return words


def patience(timeout: float) -> int:
    """These seconds as the word of that name."""
    return min(math.ceil(1000 * timeout), (1 << 31) - 1)
