"""A transformer whose gradient is larger than 1 GB, trained for real steps on two ranks: what takes how long, and how
much memory.

    python -m benchmarks.questions.large                       # over loopback; some minutes, 14 GB of memory
    python -m benchmarks.questions.large --rate 1gbit          # between emulated hosts; needs root
    python -m benchmarks.questions.large --show                # what was measured before

A GPT of 14 layers of 1,280 learns to predict the bytes of this project's own files. Each way runs in processes of its
own, so that peaks of memory are its own too; SGD without momentum, since two ranks share a machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spardl
from benchmarks.ranks import run_ranks
from spardl.cli.output import as_bytes, as_seconds, table
from spardl.train.models.gpt import Gpt

RECORDS = Path(__file__).parent.parent / "results" / "large.json"
SOURCES = Path(__file__).parent.parent.parent / "src"
SHAPE = {"width": 1280, "layers": 14, "heads": 20, "dropout": 0.0}
BYTES, WINDOW, BATCH = 256, 64, 1
RANKS, WARM_UP, STEPS, RATE = 2, 1, 5, 0.002
STATUS = Path("/proc/self/status")
WAYS: dict[str, dict[str, Any] | None] = {
    "DDP as it is": None,
    "spardl, 1 %": {"density": 0.01},
    "spardl, 0.1 %": {"density": 0.001},
    "local updates, 1 %": {"density": 0.01, "update": "local"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of emulated lines, such as 1gbit; default: loopback")
    parser.add_argument("--way", choices=tuple(WAYS), action="append", help="default: all of them")
    parser.add_argument("--layers", type=int, default=SHAPE["layers"], metavar="N", help="default: %(default)s")
    parser.add_argument("--show", action="store_true", help="print what was measured before, and measure nothing")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        take_part(options)
        return
    for way in [] if options.show else options.way or WAYS:
        keep(run(way, options))
    show(load())


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train by one way, on ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.questions.large", "--as-rank", str(target), "--way", way]
        command += ["--layers", str(options.layers)]
        if options.rate is None:
            run_ranks(command, RANKS)
        else:
            lab = [sys.executable, "-m", "benchmarks.netlab", "--hosts", str(RANKS), "--rate", options.rate, "--"]
            subprocess.run([*lab, *command], check=True)
        found: dict[str, Any] = json.loads(target.read_text())
        return {"lines": options.rate or "loopback", **found}


# --- on a rank --------------------------------------------------------------------------------------------------------


def take_part(options: argparse.Namespace) -> None:
    """Train some steps; rank 0 writes what the slowest rank took, and what the largest held."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    (way,) = options.way
    settings = WAYS[way]
    plain: nn.Module = Gpt(BYTES, WINDOW, **{**SHAPE, "layers": options.layers})
    elements = sum(each.numel() for each in plain.parameters())
    memory = {"model": resident()}
    local = settings is not None and "update" in settings
    model = plain if local else DistributedDataParallel(plain, gradient_as_bucket_view=True, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sync = None if settings is None else spardl.attach(model, optimizer=optimizer, **settings)
    memory["attached"] = resident()
    text, generator = corpus(), torch.Generator().manual_seed(dist.get_rank())
    seconds: list[dict[str, float]] = []
    losses = []
    before = None if sync is None else sync.stats().total
    for step in range(WARM_UP + STEPS):
        dist.barrier()
        phases, loss = one_step(model, optimizer, batch(text, generator))
        losses.append(loss)
        if step >= WARM_UP:
            seconds.append(phases)
        elif sync is not None:
            before = sync.stats().total
    memory["peak"] = peak()
    medians = {name: statistics.median(each[name] for each in seconds) for name in seconds[0]}
    if sync is not None:
        assert before is not None
        total = sync.stats().total
        for part in ("selecting", "packing", "waiting", "transferring"):
            name = f"seconds_{part}"
            medians[f"of it {part}"] = (getattr(total, name) - getattr(before, name)) / STEPS
        sent = (total.bytes_sent - before.bytes_sent) / STEPS
    else:
        sent = 4.0 * elements  # of a ring of two ranks
    record = {"way": way, "elements": elements, "seconds": medians, "memory": memory, "bytes": sent, "losses": losses}
    write(record, Path(options.as_rank))
    dist.destroy_process_group()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, given: Tensor) -> tuple[dict[str, float], float]:
    """A step of training, and what its phases took. DDP exchanges in backward, local updates after the optimizer."""
    phases: dict[str, float] = {}
    with timed(phases, "step"):
        optimizer.zero_grad()
        with timed(phases, "forward"):
            loss = cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
        with timed(phases, "backward and exchange"):
            loss.backward()
        with timed(phases, "optimizer"):
            optimizer.step()
    return phases, loss.item()


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - started


def corpus() -> Tensor:
    """All of this project's sources, as bytes."""
    files = sorted(SOURCES.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8).long()


def batch(text: Tensor, generator: torch.Generator) -> Tensor:
    firsts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator)
    return torch.stack([text[first : first + WINDOW + 1] for first in firsts.tolist()])


def resident() -> int:
    """Bytes that this process holds."""
    return _status("VmRSS")


def peak() -> int:
    """The most that it has held."""
    return _status("VmHWM")


def _status(name: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def write(record: dict[str, Any], target: Path) -> None:
    """Of all ranks the slowest and the largest. Collective."""
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, record)
    for part in ("seconds", "memory"):
        record[part] = {name: max(each[part][name] for each in everyone) for name in record[part]}
    if dist.get_rank() == 0:
        target.write_text(json.dumps(record))


# --- what came of it --------------------------------------------------------------------------------------------------


def load() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def keep(record: dict[str, Any]) -> None:
    """Instead of an older one of the same way and lines."""
    others = [each for each in load() if (each["way"], each["lines"]) != (record["way"], record["lines"])]
    RECORDS.write_text("".join(json.dumps(each) + "\n" for each in [*others, record]))


def show(records: list[dict[str, Any]]) -> None:
    rows = []
    for each in records:
        taken, held = each["seconds"], each["memory"]
        exchange = sum(value for name, value in taken.items() if name.startswith("of it"))
        rows.append(
            (
                each["lines"],
                each["way"],
                *(as_seconds(taken[name]) for name in ("step", "forward", "backward and exchange", "optimizer")),
                as_seconds(exchange) if exchange else "",
                as_bytes(each["bytes"]),
                as_bytes(held["peak"]),
                f"{each['losses'][0]:.2f} to {each['losses'][-1]:.2f}",
            )
        )
    columns = ("lines", "way", "step", "forward", "backward", "optimizer", "exchange", "sent", "peak memory", "loss")
    if records:
        elements = records[0]["elements"]
        table(f"{RANKS} ranks, {elements:,} parameters, a gradient of {as_bytes(4 * elements)}", columns, rows)


if __name__ == "__main__":
    main()
