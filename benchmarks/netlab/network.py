"""Hosts, a switch between them, and what their links let through. Needs root, ip(8) and tc(8)."""

import subprocess
from dataclasses import dataclass

PREFIX = "10.77.0"
INTERFACE = "e0"
SWITCH = "switch"
# What a link may send at once after a pause. Small, so that short messages do not travel for free; but a packet as the
# kernel hands it over (64 KiB with segmentation offload) has to fit.
BURST = "64kb"
QUEUE = "200ms"


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
    _run("mount", "-t", "tmpfs", "none", "/run/netns")
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
        _run(*add, *parent, "handle", "10:", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(f"{command[0]} is not installed; get it with the package iproute2.") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LabError(f"`{' '.join(command)}` failed: {said[-1] if said else done.returncode}")
