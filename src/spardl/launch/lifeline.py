"""The line between the launcher and a worker: failures go up it, and where it ends the launcher is gone."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Self

VARIABLE = "SPARDL_LIFELINE"

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `echo` says that it only noticed that another one had gone."""

    text: str
    code: int = 1
    echo: bool = False

    @classmethod
    def from_report(cls, report: bytes) -> Self | None:
        """What a worker wrote before it ended, or None if it wrote nothing that can be read."""
        try:
            return cls(**json.loads(report))
        except (ValueError, TypeError):
            return None


class Lifeline:
    """The worker's end. A worker that loses its launcher ends at once, so that nobody is left behind."""

    def __init__(self, descriptor: int) -> None:
        _end_with_parent()
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Self | None:
        """The line that our launcher has laid, or None if somebody else started this process."""
        descriptor = os.environ.pop(VARIABLE, None)
        return cls(int(descriptor)) if descriptor is not None else None

    def report(self, failure: Failure) -> None:
        """Tell the launcher, which shows one failure for all."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(asdict(failure)).encode())

    def _watch(self) -> None:
        # Nothing ever comes down the line: reading returns when the other end is closed.
        with contextlib.suppress(OSError):
            self._socket.recv(1)
        os._exit(1)


def _end_with_parent() -> None:
    """Let the system kill this process when its launcher ends, even while it is stopped and can notice nothing.

    Linux only; elsewhere, a worker that is stopped ends when it goes on.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
