"""What one small message costs: a round in which every rank sends 8 bytes to the next one and receives 8 bytes.

    python -m benchmarks.latency --workers 2 4 8

All ways run in the same processes, a few rounds of each in turn, so that noise hits all alike; plain sockets are the
least that any of them can take. With mpiexec beside Python (pip install mpich mpi4py) MPI takes part. On several
hosts it measures the ranks that it is started as:

    python -m benchmarks.netlab --hosts 4 -- python -m benchmarks.latency
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ranks import meeting_point, run_ranks
from spardl.agreement import gather_values
from spardl.cli.output import as_seconds, table
from spardl.collectives.program import Message, Round
from spardl.transport.base import Transport
from spardl.transport.direct import DirectTransport
from spardl.transport.torchdist import TorchTransport

TIMEOUT = 60.0
MPIEXEC = Path(sys.executable).parent / "mpiexec"

Once = Callable[[], object]
Figures = dict[str, tuple[float, float]]  # seconds per round by way: lower quartile and median over turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--bytes", type=int, default=8, help="of each message; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="of one way in a row; default: %(default)s")
    parser.add_argument("--turns", type=int, default=30, help="of each way; default: %(default)s")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rank = os.environ.get("RANK", os.environ.get("PMI_RANK"))
    if rank is None:
        show({workers: start(workers, options) for workers in options.workers}, options)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(os.environ["WORLD_SIZE"]))
    figures = measure(options)
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0" and options.result:
        Path(options.result).write_text(json.dumps(figures))
    elif rank == "0":
        show({int(os.environ["WORLD_SIZE"]): figures}, options)


def start(workers: int, options: argparse.Namespace) -> Figures:
    """Run so many ranks of this program here."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.latency", "--result", str(result)]
        for name in ("bytes", "rounds", "turns"):
            command += [f"--{name}", str(getattr(options, name))]
        if MPIEXEC.exists():
            environment = {**os.environ, **meeting_point(workers)}
            subprocess.run([str(MPIEXEC), "-n", str(workers), *command], env=environment, check=True)
        else:
            run_ranks(command, workers)
        figures: Figures = json.loads(result.read_text())
        return figures


def measure(options: argparse.Namespace) -> Figures:
    """As one of the ranks: figures over turns, of which each is the median over ranks."""
    gloo = TorchTransport(timeout=TIMEOUT)
    ways = {"gloo (TorchTransport)": exchange(gloo, options.bytes)}
    with contextlib.suppress(ImportError):
        if "PMI_RANK" in os.environ:
            from spardl.transport.mpi import MPITransport

            ways["MPI (MPITransport)"] = exchange(MPITransport(timeout=TIMEOUT), options.bytes)
    ways["direct (DirectTransport)"] = exchange(DirectTransport(timeout=TIMEOUT), options.bytes)
    ways["plain sockets"] = ring(gloo, options.bytes)
    if gloo.workers == 2:
        ways["plain sockets, there and back"] = ping_pong(gloo, options.bytes)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.turns):
        for way, once in ways.items():
            seconds[way].append(timed(once, options.rounds))
    mine = {way: statistics.quantiles(each, n=4)[:2] for way, each in seconds.items()}
    everyone = gather_values(gloo.gather_texts, mine)
    low, median = ({way: statistics.median(theirs[way][i] for theirs in everyone) for way in ways} for i in (0, 1))
    return {way: (low[way], median[way]) for way in ways}


def timed(once: Once, rounds: int) -> float:
    for _ in range(max(3, rounds // 5)):  # ranks come from another way, not all at the same time
        once()
    started = time.perf_counter()
    for _ in range(rounds):
        once()
    return (time.perf_counter() - started) / rounds


def exchange(transport: Transport, size: int) -> Once:
    rank, workers = transport.rank, transport.workers
    frame = torch.zeros(size, dtype=torch.uint8)
    operation = Round([Message((rank + 1) % workers, frame, size)], [((rank - 1) % workers, size)], "latency")
    return lambda: transport.perform(operation)


def ring(gloo: TorchTransport, size: int) -> Once:
    """Two blocking sockets, as one would write it by hand. For messages that fit the kernel's buffers."""
    to_next, from_last = neighbours(gloo)
    message, buffer = bytes(size), bytearray(size)

    def once() -> None:
        to_next.sendall(message)
        receive(from_last, buffer)

    return once


def ping_pong(gloo: TorchTransport, size: int) -> Once:
    """Two ranks in turn: the least time from one process to another and back."""
    line = neighbours(gloo)[gloo.rank]  # one connection between the two of them
    message, buffer = bytes(size), bytearray(size)

    def once() -> None:
        if gloo.rank == 0:
            line.sendall(message)
        receive(line, buffer)
        if gloo.rank == 1:
            line.sendall(message)

    return once


def receive(line: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        view = view[line.recv_into(view) :]


def neighbours(gloo: TorchTransport) -> tuple[socket.socket, socket.socket]:
    """Connections to the next rank and from the one before."""
    with socket.create_server((gloo.addresses[gloo.rank], 0)) as server:
        ports = gloo.gather_texts(str(server.getsockname()[1]))
        peer = (gloo.rank + 1) % gloo.workers
        to_next = socket.create_connection((gloo.addresses[peer], int(ports[peer])), timeout=TIMEOUT)
        from_last, _ = server.accept()
    for line in (to_next, from_last):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(TIMEOUT)
    return to_next, from_last


def show(found: dict[int, Figures], options: argparse.Namespace) -> None:
    ways = dict.fromkeys(way for figures in found.values() for way in figures)
    slowest_first = sorted(ways, key=lambda way: -max(figures.get(way, (0.0,))[-1] for figures in found.values()))
    rows = [
        (way, *(as_seconds(*figures[way]) if way in figures else "-" for figures in found.values()))
        for way in slowest_first
    ]
    table(
        f"One round of {options.bytes} bytes to the next rank, on {os.cpu_count()} cores",
        ("transport", *(f"{workers} ranks" for workers in found)),
        rows,
        note=f"Lower quartile and median of {options.turns} turns of {options.rounds} rounds.",
    )
    if options.json:
        Path(options.json).write_text(json.dumps({"bytes": options.bytes, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
