"""Run a command once per emulated host, as ranks of one run.

    python -m benchmarks.netlab --hosts 4 --rate 100mbit -- spardl bench --elements 1e6 --methods dense,spardl

Each host is a network namespace with its own address on a virtual switch; its line is limited both ways. The command
gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as a launcher would set them. Everything lives
in namespaces of this process alone: however it ends, hosts and ranks are gone with it. Needs root.
"""

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import NoReturn

from benchmarks.netlab.network import INTERFACE, RATE, LabError, Link, address, build, name

PORT = 29400
INSIDE = "SPARDL_NETLAB"
DELAY = re.compile(r"\d+(\.\d+)?(us|ms|s)")
PROBE_BYTES = 4 << 20


def main() -> NoReturn:
    options = parser().parse_args()
    try:
        links = links_of(options)
        if INSIDE not in os.environ:
            enter()
        build(links)
        sys.exit(check(links) if options.check else run(options.command, len(links), options.timeout))
    except LabError as error:
        sys.exit(f"netlab: {error}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    made.add_argument("--rate", metavar="RATE", help="of every line, both ways, as tc writes it: 100mbit, 1gbit")
    made.add_argument("--up", metavar="RATE", help="of every line, from the host; instead of --rate")
    made.add_argument("--down", metavar="RATE", help="of every line, to the host; instead of --rate")
    made.add_argument("--delay", metavar="TIME", help="of every packet that a host sends: 500us, 5ms (needs netem)")
    made.add_argument(
        "--slow", action="append", default=[], metavar="HOST:RATE", help="another rate for this host; may be repeated"
    )
    made.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="end the command after this")
    made.add_argument("--check", action="store_true", help="measure the lines instead of running a command")
    made.add_argument("command", nargs="*", metavar="COMMAND", help="after --; {rank} stands for the host's number")
    return made


def links_of(options: argparse.Namespace) -> list[Link]:
    if not 1 <= options.hosts <= 250:
        raise LabError(f"{options.hosts} hosts cannot be made; give 1 to 250.")
    if not options.command and not options.check:
        raise LabError("there is no command to run; give one after --, or --check.")
    line = Link(options.up or options.rate, options.down or options.rate, options.delay)
    links = [line] * options.hosts
    for slow in options.slow:
        host, _, rate = slow.partition(":")
        if not (host.isdecimal() and int(host) < options.hosts):
            raise LabError(f"--slow {slow} names no host; give HOST:RATE with a host from 0 to {options.hosts - 1}.")
        links[int(host)] = replace(line, up=rate, down=rate)
    for link in links:
        for rate in (link.up, link.down):
            if rate is not None and not RATE.fullmatch(rate):
                raise LabError(f"{rate!r} is not a rate; write it like 100mbit or 1gbit.")
        if link.delay is not None and not DELAY.fullmatch(link.delay):
            raise LabError(f"{link.delay!r} is not a delay; write it like 500us or 5ms.")
    return links


def enter() -> NoReturn:
    """Start again in namespaces of our own. The kernel ends everything in them when the first process does."""
    if os.geteuid() != 0:
        raise LabError("making network namespaces needs root; use sudo.")
    if shutil.which("unshare") is None:
        raise LabError("unshare is not installed; get it with the package util-linux.")
    arguments = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    process = subprocess.Popen(
        ["unshare", *arguments, sys.executable, "-m", "benchmarks.netlab", *sys.argv[1:]],
        env={**os.environ, INSIDE: "1"},
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.kill())  # unshare waits for its child whatever else it is told
    sys.exit(process.wait())


def run(command: list[str], hosts: int, timeout: float) -> int:
    """One rank per host. The first failure ends all; its exit code is ours."""
    ranks = [_start(command, rank, hosts) for rank in range(hosts)]
    deadline = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed or time.monotonic() > deadline:
            time.sleep(3 if failed else 0)  # time to say why
            for rank in ranks:
                rank.kill()
            if not failed:
                raise LabError(f"the command did not end within {timeout:g} s.")
            return failed[0]
        time.sleep(0.05)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def _start(command: list[str], rank: int, hosts: int) -> "subprocess.Popen[bytes]":
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(hosts),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **place}
    words = [word.replace("{rank}", str(rank)) for word in command]
    return subprocess.Popen(["ip", "netns", "exec", name(rank), *words], env=environment)


def check(links: list[Link]) -> int:
    """Send from every host to the next, and print what came through."""
    for host in range(len(links)):
        peer = (host + 1) % len(links)
        if peer == host:
            raise LabError("one host has nobody to send to; give --hosts 2 or more.")
        listener = _in_host(peer, "receive")
        time.sleep(0.3)
        sender = _in_host(host, "send", address(peer))
        rate = float(listener.communicate(timeout=600)[0])
        sender.wait()
        print(f"host {host} -> host {peer}: {rate * 8 / 1e6:.1f} Mbit/s of payload")
    return 0


def _in_host(host: int, role: str, *arguments: str) -> "subprocess.Popen[str]":
    code = f"from benchmarks.netlab.__main__ import {role}; {role}(*{arguments!r})"
    return subprocess.Popen(
        ["ip", "netns", "exec", name(host), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )


def send(to: str) -> None:
    with socket.create_connection((to, PORT), timeout=60) as line:
        line.sendall(bytes(PROBE_BYTES))


def receive() -> None:
    with socket.create_server(("", PORT)) as server:
        line, _ = server.accept()
        with line:
            got = len(line.recv(1 << 20))  # the clock starts with the first bytes, after the handshake
            started, first = time.perf_counter(), got
            while got < PROBE_BYTES:
                got += len(line.recv(1 << 20))
            print((got - first) / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
