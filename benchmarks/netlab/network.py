"""Hosts, a switch between them, and what their links let through. Needs root, ip(8) and tc(8)."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = Path("/run/netns")  # where ip(8) keeps network namespaces by name
PREFIX = "10.77.0"
INTERFACE = "e0"
SWITCH = "switch"
# What a link may send at once after a pause: half a millisecond of its rate, within bounds. Small, so that short
# messages do not travel for free; a packet has to fit.
BURST_S = 0.5e-3
BURST_BYTES = (5_000, 64_000)
PACKET = 1_514
QUEUE = "200ms"
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)(bit|bps)")


class LabError(Exception):
    """The laboratory cannot be built; the text says why."""


@dataclass(frozen=True)
class Link:
    """One host's line: rates as tc(8) writes them (100mbit, 1gbit), to and from the switch; None is unlimited."""

    up: str | None = None
    down: str | None = None
    delay: str | None = None


def address(host: int) -> str:
    return f"{PREFIX}.{host + 1}"


def name(host: int) -> str:
    return f"h{host}"


def build(links: list[Link]) -> None:
    """Make the hosts in this process's own network namespace, whose end is theirs."""
    NAMES.mkdir(parents=True, exist_ok=True)  # ip(8) makes it with the first host, too late for a mount
    _run("mount", "-t", "tmpfs", "none", str(NAMES))
    _run("ip", "link", "add", SWITCH, "type", "bridge")
    _run("ip", "link", "set", SWITCH, "up")
    for host, link in enumerate(links):
        port = f"p{host}"
        _run("ip", "netns", "add", name(host))
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name(host))
        _run("ip", "link", "set", port, "master", SWITCH, "up")
        for command in (
            ("addr", "add", f"{address(host)}/24", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", name(host), *command)
        # A stack hands over many packets at once; what exceeds the burst would be cut up, which costs the cores that
        # all hosts share more than the rest of their work.
        largest = min(burst(rate) for rate in (link.up, link.down)) - PACKET
        _run("ip", "-n", name(host), "link", "set", INTERFACE, "gso_max_size", str(largest))
        _shape(link.up, link.delay, "tc", "-n", name(host), "qdisc", "add", "dev", INTERFACE)
        _shape(link.down, None, "tc", "qdisc", "add", "dev", port)


def _shape(rate: str | None, delay: str | None, *add: str) -> None:
    parent = ["root"]
    if delay is not None:
        try:
            _run(*add, "root", "handle", "1:", "netem", "delay", delay, "limit", "100000")
        except LabError as error:
            raise LabError(
                f"this kernel cannot delay packets (no netem: {error}); leave --delay out, and take latency from"
                " `spardl simulate --latency` or `spardl bench --latency`, which treat all methods alike."
            ) from None
        parent = ["parent", "1:1"]
    if rate is not None:
        _run(*add, *parent, "handle", "10:", "tbf", "rate", rate, "burst", str(burst(rate)), "latency", QUEUE)


def burst(rate: str | None) -> int:
    """Bytes that a line of this rate may send at once."""
    usual = BURST_BYTES[1] if rate is None else round(BURST_S * bytes_per_second(rate))
    return max(BURST_BYTES[0], min(BURST_BYTES[1], usual))


def bytes_per_second(rate: str) -> float:
    """The bytes per second of a rate as tc(8) writes it; bps are bytes there."""
    number, unit, kind = RATE.fullmatch(rate).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit] / (8 if kind == "bit" else 1)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(f"{command[0]} is not installed; get it with the package iproute2.") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LabError(f"`{' '.join(command)}` failed: {said[-1] if said else done.returncode}")
