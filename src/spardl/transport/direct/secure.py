"""Lines that nobody else can read, change or join: TLS 1.3, with a key and a certificate that the user gives all ranks.

Both ends of a line must show the certificate of that one file, and trust no other; whoever has the file is a member. It
cannot come from the ranks themselves: they meet in a store that anybody on the way can read. So it is made once, by

    openssl req -x509 -newkey ed25519 -nodes -days 3650 -subj /CN=spardl -keyout run.pem -out run.crt
    cat run.crt >> run.pem; chmod 600 run.pem

and copied to every host by a way that is safe.
"""

import contextlib
import hashlib
import math
import select
import socket
import ssl
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spardl.errors import ConfigError, PeerError, SparDLWarning

OPEN = "Others on this machine can read the key {path}, and whoever has it is a member: chmod 600 {path}."
CHUNK = 1 << 16  # bytes that are encrypted, or received, at once


class Key:
    """What is in such a file.

    digest  of it: makes a secret that was sent in clear one that only members know
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.digest = hashlib.sha256(Path(path).read_bytes()).digest()
            if Path(path).stat().st_mode & 0o077:
                warnings.warn(OPEN.format(path=path), SparDLWarning, stacklevel=2)
            self._called, self._calling = (_context(path, side) for side in _SIDES)
        except OSError as error:  # ssl's own are some as well
            raise ConfigError(
                f"encrypt={str(path)!r} is no file with a key and a certificate ({error.strerror or error}); make one"
                " as SECURITY.md says, and give the same to all ranks."
            ) from error

    def tls(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *, called: bool) -> ssl.SSLObject:
        """One end of a line, the one that was `called` or the one that calls."""
        context = self._called if called else self._calling
        return context.wrap_bio(incoming, outgoing, server_side=called)


_SIDES = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


def _context(path: str | Path, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(path)
    context.load_verify_locations(path)
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no line is ever resumed
    return context


class SecureLine:
    """A connection with a socket's verbs, as far as `Link` uses them; none of them waits.

    `holds`: something has arrived that the system does not know of any more, so that nobody must wait for it.
    """

    def __init__(self, line: socket.socket, key: Key, *, called: bool) -> None:
        self._line = line
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = key.tls(self._in, self._out, called=called)
        self._cipher = memoryview(b"")  # encrypted, and not sent yet
        self._owed = 0  # bytes of which that is, which count as sent when it is

    def shake_hands(self, deadline: float) -> None:
        """Raises `OSError` if the other end is none of us, or says nothing until then."""
        while True:
            try:
                self._tls.do_handshake()
                self._send_all(deadline)
                return
            except ssl.SSLWantReadError:
                self._send_all(deadline)
            _wait(self._line, select.POLLIN, deadline)
            heard = self._line.recv(CHUNK)
            if not heard:
                raise ConnectionError("it hung up")
            self._in.write(heard)

    def _send_all(self, deadline: float) -> None:
        self._cipher = memoryview(bytes(self._cipher) + self._out.read())
        while not self._flush():
            _wait(self._line, select.POLLOUT, deadline)

    def holds(self) -> bool:
        return bool(self._in.pending or self._tls.pending())

    def sendmsg(self, parts: Sequence[memoryview], ancillary: Any = (), flags: int = 0) -> int:
        """Bytes count as sent when all of what they were encrypted to has left; until then the same are asked for."""
        if not self._flush():
            raise BlockingIOError
        if not self._owed:
            for part in parts:
                taken = part[: CHUNK - self._owed]
                if len(taken):
                    self._owed += self._tls.write(taken)
            self._cipher = memoryview(self._out.read())
            if not self._flush():
                raise BlockingIOError
        sent, self._owed = self._owed, 0
        return sent

    def _flush(self) -> bool:
        """Send what is encrypted; whether nothing of it is left."""
        with contextlib.suppress(BlockingIOError):
            while self._cipher:
                self._cipher = self._cipher[self._line.send(self._cipher, socket.MSG_DONTWAIT) :]
        return not self._cipher

    def send(self, data: bytes, flags: int = 0) -> int:
        return self.sendmsg([memoryview(data)])

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        read: Any = self._tls.read  # with a buffer it says how much it has read
        while True:
            try:
                return int(read(len(view), view))
            except ssl.SSLWantReadError:
                heard = self._line.recv(CHUNK, socket.MSG_DONTWAIT)
                self._in.write(heard) if heard else self._in.write_eof()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def fileno(self) -> int:
        return self._line.fileno()

    def getpeername(self) -> Any:
        return self._line.getpeername()

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        self._line.setsockopt(level, option, value)

    def setblocking(self, flag: bool) -> None:
        self._line.setblocking(flag)

    def close(self) -> None:
        self._line.close()


def secured(lines: Mapping[int, socket.socket], rank: int, key: Key, *, timeout: float) -> dict[int, SecureLine]:
    """The same lines, encrypted. Collective: all ranks go through their peers in order, so that none waits in a ring.

    Raises:
        PeerError: a peer has another key, or none.
    """
    found: dict[int, SecureLine] = {}
    try:
        for peer in sorted(lines):
            line = SecureLine(lines[peer], key, called=rank < peer)
            line.shake_hands(time.monotonic() + timeout)
            found[peer] = line
    except OSError as error:
        for each in lines.values():
            each.close()
        reason = getattr(error, "verify_message", "") or error.strerror or str(error)
        raise PeerError(
            f"rank {peer} and rank {rank} could not agree on encryption ({reason}); give all ranks the same file for"
            " encrypt.",
            peer=peer,
            candidates=(peer, rank),
        ) from error
    return found


def _wait(line: socket.socket, events: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(line, events)
    if not poller.poll(math.ceil(1000 * max(0.0, deadline - time.monotonic()))):
        raise TimeoutError("it says nothing")
