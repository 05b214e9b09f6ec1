"""Where attacked runs live: hosts of their own in network namespaces, or one machine where there are none."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from typing import Any, Protocol

from benchmarks.netlab.network import INTERFACE, NAMES, Link, address, build, name

CLONE_NEWNET = 0x40000000
MOST = 4  # ranks


class Lab(Protocol):
    """Where a rank enters its host, where ranks meet, and what can be done to a line."""

    has_lines: bool

    def place(self) -> dict[str, Any]: ...

    def enter(self, rank: int) -> None: ...

    def cut(self, rank: int, rate: str) -> None: ...

    def mend(self, rank: int) -> None: ...


class Loopback:
    """All ranks on one host. Lines cannot be cut."""

    has_lines = False

    def place(self) -> dict[str, Any]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return {"host": "127.0.0.1", "port": probe.getsockname()[1]}

    def enter(self, rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

    def cut(self, rank: int, rate: str) -> None:
        raise ValueError("all ranks are on one host, which has no lines to cut; run as root, for hosts of their own")

    def mend(self, rank: int) -> None:
        pass


class Hosts:
    """Each rank on a host of its own, on a virtual switch. Needs root, and namespaces of this process's own."""

    has_lines = True

    def __init__(self) -> None:
        build([Link()] * MOST)
        _run("ip", "link", "set", "lo", "up")  # for commands that start ranks of their own
        self._port = 30_000

    def place(self) -> dict[str, Any]:
        self._port += 1
        return {"host": address(0), "port": self._port}

    def enter(self, rank: int) -> None:
        with (NAMES / name(rank)).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the host of rank {rank}")
        os.environ |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": INTERFACE}

    def cut(self, rank: int, rate: str) -> None:
        """Let nothing through to and from this host any more, or as good as nothing."""
        if not rate:
            _run("ip", "link", "set", f"p{rank}", "down")
            return
        shape = ("root", "tbf", "rate", rate, "burst", "1600", "latency", "400ms")
        _run("tc", "qdisc", "add", "dev", f"p{rank}", *shape)
        _run("tc", "-n", name(rank), "qdisc", "add", "dev", INTERFACE, *shape)

    def mend(self, rank: int) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("tc", "qdisc", "del", "dev", f"p{rank}", "root")
            _run("tc", "-n", name(rank), "qdisc", "del", "dev", INTERFACE, "root")
        _run("ip", "link", "set", f"p{rank}", "up")


def can_have_hosts() -> bool:
    """Whether this process may make namespaces of its own."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
