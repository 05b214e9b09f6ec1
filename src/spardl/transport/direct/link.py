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
from spardl.transport.direct.secure import SecureLine

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
    """The peer moves nothing. `peers` are all that are waited for."""

    def __init__(self, words: str, peer: int, peers: tuple[int, ...]) -> None:
        super().__init__(words, peer)
        self.peers = peers


class Wrong(Trouble):
    """The peer sent what this round does not expect."""


class Gone(Trouble):
    """The line is closed. `blamed` is whom the peer left because of: itself, if it did not say.

    `broken`: nobody closed it, but the network lets nothing through any more.
    """

    def __init__(self, words: str, peer: int, blamed: int | None = None, *, broken: bool = False) -> None:
        super().__init__(words, peer)
        self.blamed = peer if blamed is None else blamed
        self.broken = broken


class Link:
    """A line to `peer`. One message each way at a time.

    blocks  prepared for the compiled exchange, which waits on it; all else asks not to wait
    """

    def __init__(self, peer: int, line: "socket.socket | SecureLine", timeout: float, *, blocks: bool) -> None:
        if blocks:
            line.setblocking(True)
        _notice_dead_lines(line, timeout)
        self.peer = peer
        self.fd = line.fileno()
        self.moved = 0  # bytes, both ways
        self.place = place_text(line.getpeername())
        self.unsent: list[memoryview] = []
        self.expecting = False
        self.started = False  # the expected message has begun to arrive
        self.words = record.record(self.fd, timeout)
        self._line, self._blocks = line, blocks
        self.limit(timeout)
        self._holds = line.holds if isinstance(line, SecureLine) else None
        memory = self.words.data.cast("B")
        self._lead = memory[8 * record.OUT :][: _HEADER.size]
        self._head = memory[8 * record.IN :][: _HEADER.size]
        self._into = self._head
        self._payload: Bytes | None = None
        self._capacity = self._mark = 0

    def limit(self, timeout: float) -> None:
        """A wait may take so many seconds from now on."""
        if self._blocks:
            limit = struct.pack("@ll", *divmod(math.ceil(timeout * 1e6), 1_000_000))
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.words[record.PATIENCE] = record.patience(timeout)

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
            sent = self._line.sendmsg(self.unsent, (), _AT_ONCE)
            self.unsent = _after(sent, self.unsent)
            self.moved += sent
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
        if self._holds is not None and self._holds():
            self.pull()  # nothing else would: the system has handed it over already

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
                self.moved += got
                self._into = self._into[got:]
                if self._into:
                    if self._holds is not None:
                        continue
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

    def go_on_with(self, end: int, frame: Bytes, source: "Link", buffer: Bytes, mark: int) -> int:
        """Prepare this link, on which `frame` leaves, and `source` for the rest of an exchange that ended like this.

        Returns how many bytes it has moved.
        """
        sent = _HEADER.size + frame.size
        if end == record.UNSENT:
            sent = max(0, int(self.words[record.SENT]))
            self.go_on_sending(frame, sent)
        heard = 0 if end == record.UNSENT else max(0, int(source.words[record.HEARD]))
        if end == record.UNFINISHED:
            source.fill(buffer[: int(source.words[record.IN])], heard)
        else:
            source.expect(buffer.size, mark, heard)
        return sent + heard

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
            return Gone(f"cannot be reached any more ({error.strerror or error})", self.peer, broken=True)
        midst = " in the midst of a message" if self.started else ""
        return Gone(f"closed the connection{midst}", self.peer)


def _notice_dead_lines(line: "socket.socket | SecureLine", timeout: float) -> None:
    """Let the system end a line on which nothing comes back for long, also while nobody uses it.

    Bytes that the peer has no room for count as unanswered too: hence three times the timeout, which rounds keep.
    """
    options = {"TCP_KEEPIDLE": max(1, int(timeout / 2)), "TCP_KEEPINTVL": max(1, int(timeout / 6)), "TCP_KEEPCNT": 3}
    options["TCP_USER_TIMEOUT"] = min(math.ceil(3000 * timeout), (1 << 31) - 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            limit = 32_767 if name.startswith("TCP_KEEP") else value
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(value, limit))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _after(sent: int, parts: list[memoryview]) -> list[memoryview]:
    """What is left of the parts when this many bytes of them were sent."""
    rest = []
    for part in parts:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    return rest
