"""Where this rank can be reached by the others."""

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def routed_address(goal: str | None = None) -> str:
    """The address that peers see, found by asking for a route to one, or to the master; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((goal or os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def own_address(known: str) -> str:
    """Where to listen: at the interface that gloo was told to use, else at the address known to the process group."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if not interface:
        return known
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    except OSError:
        return known  # it has no IPv4 address
