"""Memory that synchronisation takes beyond the gradient: a gradient of BERT-large's size, on 2 ranks of this machine.

    python -m benchmarks.memory --model bert-large --workers 2

Peaks are of the resident set, as the kernel counts it, from the moment at which a rank holds its gradient and has all
code loaded. The limit is one float32 accumulator, and the entries of a step (an index and a value each).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from spardl.allreduce import all_reduce
from spardl.bench.vectors import vector_of_length
from spardl.cli.bench import vector_of_model
from spardl.cli.output import as_bytes, as_percent, as_seconds, table
from spardl.memory.layout import entries

ALLOWED = 24 << 30  # bytes, of all ranks together
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large", help="whose gradient; default: %(default)s")
    parser.add_argument("--elements", type=float, help="a gradient of this length instead")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--method", default="spardl", help="default: %(default)s")
    parser.add_argument("--density", type=float, default=0.01, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        take_part(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([sys.executable, "-m", "benchmarks.memory", *sys.argv[1:], "--folder", folder], options.workers)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.workers)]
    show(found)
    if options.json:
        Path(options.json).write_text("".join(json.dumps(record) + "\n" for record in found))


def take_part(options: argparse.Namespace) -> None:
    """As one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = {"method": options.method, "density": options.density}
    all_reduce(torch.randn(10_000), name="small", **settings)  # loads and compiles what is needed
    elements = length(options)
    gradient = torch.randn(elements)
    held, before = 4 * elements, status("VmRSS")
    reset_peak()
    seconds = []
    for _ in range(options.steps):
        gradient.normal_()
        dist.barrier()
        started = time.perf_counter()
        all_reduce(gradient, name="large", **settings)
        seconds.append(time.perf_counter() - started)
    record = {
        "rank": dist.get_rank(),
        "workers": options.workers,
        "method": options.method,
        "density": options.density,
        "elements": elements,
        "gradient_bytes": held,
        "before_bytes": before,
        "peak_bytes": status("VmHWM"),
        "beyond_bytes": status("VmHWM") - before,
        "limit_bytes": 4 * elements + 8 * entries(options.density, elements),
        "allowed_bytes": ALLOWED,
        "seconds": seconds,
    }
    (Path(options.folder) / f"{record['rank']}.json").write_text(json.dumps(record))
    dist.barrier()


def length(options: argparse.Namespace) -> int:
    vector = vector_of_model(options.model) if options.elements is None else vector_of_length(int(options.elements))
    return vector.elements


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def reset_peak() -> None:
    """Forget earlier peaks, where the kernel lets us; where not, nothing before was larger than the gradient."""
    if os.access(RESET, os.W_OK):
        RESET.write_text("5")


def show(found: list[dict[str, Any]]) -> None:
    first = found[0]
    total = sum(record["peak_bytes"] for record in found)
    table(
        f"A gradient of {first['elements']:,} elements ({as_bytes(first['gradient_bytes'])}), {first['workers']} ranks,"
        f" {first['method']} at {as_percent(first['density'])}",
        ("rank", "before", "peak", "beyond the gradient", "limit", "x of limit", "last step"),
        [
            (
                str(record["rank"]),
                as_bytes(record["before_bytes"]),
                as_bytes(record["peak_bytes"]),
                as_bytes(record["beyond_bytes"]),
                as_bytes(record["limit_bytes"]),
                f"{record['beyond_bytes'] / record['limit_bytes']:.2f}",
                as_seconds(record["seconds"][-1]),
            )
            for record in found
        ],
        note=f"All ranks together: {total / 2**30:.1f} GiB of {ALLOWED / 2**30:.0f} GiB."
        " limit: one accumulator and a step's entries.",
    )


if __name__ == "__main__":
    main()
