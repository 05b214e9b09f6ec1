"""One connection to one peer: a message is a header and a payload, straight from and into the frames' memory.

`post` and `expect` begin a message, `push` and `pull` move as much of it as can be moved now. Nothing beyond the
expected message is ever read: what a faster peer sends early waits in the kernel.
"""

import contextlib
import functools
import math
import select
import socket
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from spardl.transport.direct import record
from spardl.transport.direct.mesh import place_text

Bytes = NDArray[np.uint8]

_HEADER = struct.Struct("=qq")  # length of the payload; tag: mark of its round and number of the message on its line
_AT_ONCE = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)  # which only Linux has; Python ignores SIGPIPE


@functools.cache
def mark_of(name: str) -> int:
    """What tells messages of rounds with this name from those of others: the upper half of their tags."""
    return (zlib.crc32(name.encode()) & 0x7FFFFFFF) << 32


class Trouble(Exception):
    """What a peer did that ends the round, as words that follow its name."""

    def __init__(self, words: str, peer: int) -> None:
        super().__init__(words)
        self.peer = peer


class Silent(Trouble):
    """The peer moves nothing."""


class Wrong(Trouble):
    """The peer sent what this round does not expect."""


class Gone(Trouble):
    """The line is closed. `blamed` is whom the peer left because of: itself, if it did not say."""

    def __init__(self, words: str, peer: int, blamed: int | None = None) -> None:
        super().__init__(words, peer)
        self.blamed = peer if blamed is None else blamed


class Link:
    """A line to `peer`. One message each way at a time.

    blocks  prepared for the compiled exchange, which waits on it; all else asks not to wait
    """

    def __init__(self, peer: int, line: socket.socket, timeout: float, *, blocks: bool) -> None:
        if blocks:
            limit = struct.pack("@ll", *divmod(math.ceil(timeout * 1e6), 1_000_000))
            line.setblocking(True)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.peer = peer
        self.fd = line.fileno()
        self.place = place_text(line.getpeername())
        self.unsent: list[memoryview] = []
        self.expecting = False
        self.started = False  # the expected message has begun to arrive
        self.words = record.record(self.fd, timeout)
        self._line = line
        memory = self.words.data.cast("B")
        self._lead = memory[8 * record.OUT :][: _HEADER.size]
        self._head = memory[8 * record.IN :][: _HEADER.size]
        self._into = self._head
        self._payload: Bytes | None = None
        self._capacity = self._mark = 0

    @property
    def wants(self) -> int:
        """The events of poll(2) that it waits for; 0 when nothing is left to do."""
        return (select.POLLIN if self.expecting else 0) | (select.POLLOUT if self.unsent else 0)

    @property
    def moving(self) -> bool:
        """Whether a message is under way: partly arrived, or partly sent."""
        return self.started or bool(self.unsent)

    # --- sending --------------------------------------------------------------------------------------------------

    def post(self, frame: Bytes, mark: int) -> None:
        """Begin to send this frame. Its memory is ours until it has left."""
        number = int(self.words[record.SENDING])
        _HEADER.pack_into(self._lead, 0, frame.size, mark | number)
        self.words[record.SENDING] = (number + 1) & record.NUMBERS
        self.go_on_sending(frame, 0)
        self.push()

    def go_on_sending(self, frame: Bytes, sent: int) -> None:
        """Send the rest of a message whose header is in its place, after `sent` bytes of both have left."""
        self.unsent = _after(sent, [self._lead, frame.data])

    def push(self) -> None:
        """Send what the line takes now."""
        try:
            self.unsent = _after(self._line.sendmsg(self.unsent, (), _AT_ONCE), self.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(error) from error

    # --- receiving ------------------------------------------------------------------------------------------------

    def expect(self, capacity: int, mark: int, heard: int = 0) -> None:
        """Begin to wait for a message of at most `capacity` bytes, after `heard` bytes of its header have arrived."""
        self._capacity, self._mark = capacity, mark
        self._into = self._head[heard:]
        self._payload = None
        self.expecting, self.started = True, heard > 0
        if not self._into:
            self._open()

    def fill(self, payload: Bytes, heard: int) -> None:
        """Go on with a message whose header is complete, after `heard` bytes of its payload have arrived."""
        self._payload = payload
        self._into = payload.data[heard:]
        self.expecting = self.started = bool(self._into)

    def pull(self) -> None:
        """Receive what has arrived of the expected message."""
        try:
            while self.expecting:
                got = self._line.recv_into(self._into, 0, _AT_ONCE)
                if not got:
                    raise self._gone()
                self.started = True
                self._into = self._into[got:]
                if self._into:
                    return
                if self._payload is None:
                    self._open()
                else:
                    self.expecting = self.started = False
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(error) from error

    def take(self) -> Bytes:
        """The message that has arrived, just as long as it was sent."""
        assert self._payload is not None
        frame, self._payload = self._payload, None
        return frame

    def _open(self) -> None:
        """The header is complete."""
        length, tag = _HEADER.unpack(self._head)
        if length == record.FAREWELL:
            raise Gone("gave up", self.peer, tag)
        due, number = int(self.words[record.AWAITED]), tag & record.NUMBERS
        if tag != self._mark | due:
            which = f"message {number}" if number != due else "a message of another round"
            raise Wrong(f"sent {which} where message {due} was due", self.peer)
        if not 0 <= length <= self._capacity:
            raise Wrong(f"sent {length} bytes where at most {self._capacity} were expected", self.peer)
        self.words[record.AWAITED] = (due + 1) & record.NUMBERS
        self.fill(np.empty(length, np.uint8), 0)

    # --- what the compiled exchange has left ----------------------------------------------------------------------

    def go_on_with(self, end: int, frame: Bytes, source: "Link", buffer: Bytes, mark: int) -> None:
        """Prepare this link, on which `frame` leaves, and `source` for the rest of an exchange that ended like this."""
        if end == record.UNSENT:
            self.go_on_sending(frame, max(0, int(self.words[record.SENT])))
        heard = 0 if end == record.UNSENT else max(0, int(source.words[record.HEARD]))
        if end == record.UNFINISHED:
            source.fill(buffer[: int(source.words[record.IN])], heard)
        else:
            source.expect(buffer.size, mark, heard)

    # --- leaving --------------------------------------------------------------------------------------------------

    def leave(self, blamed: int) -> None:
        """Tell the peer that this rank gives up because of the rank `blamed`, unless it would end up in a message."""
        if not self.unsent:
            with contextlib.suppress(OSError):
                self._line.send(_HEADER.pack(record.FAREWELL, blamed), _AT_ONCE)
        self.close()

    def close(self) -> None:
        """Close the line, without a word to the peer."""
        self._line.close()
        self.fd = -1

    def epitaph(self) -> int | None:
        """Because of which rank the peer has left: itself, if it did not say. None if it is still there.

        Only for a rank that gives up as well: whatever has arrived is thrown away.
        """
        left, end = True, b""
        try:
            while some := self._line.recv(1 << 16, _AT_ONCE):
                end = (end + some)[-_HEADER.size :]
        except BlockingIOError:
            left = False
        except OSError:
            pass
        if len(end) == _HEADER.size:
            length, blamed = _HEADER.unpack(end)
            if length == record.FAREWELL:
                return int(blamed)
        return self.peer if left else None

    def _gone(self, error: OSError | None = None) -> Gone:
        if error is not None and not isinstance(error, ConnectionError):
            return Gone(f"cannot be reached any more ({error.strerror or error})", self.peer)
        midst = " in the midst of a message" if self.started else ""
        return Gone(f"closed the connection{midst}", self.peer)


def _after(sent: int, parts: list[memoryview]) -> list[memoryview]:
    """What is left of the parts when this many bytes of them were sent."""
    rest = []
    for part in parts:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    return rest
