"""A long run: memory, descriptors and threads stay as they are, and all ranks hold the same weights.

    python -m benchmarks.soak --steps 10000

Four ranks train a small model. Every so often they change method and groups, save their state through a file and load
it again; every 100 steps they compare hashes of their weights, and whoever differs ends the run. Prints what each phase
found, for the rank that has most of it; exit code 1 if anything grows.
"""

import argparse
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spardl
from benchmarks.ranks import run_ranks
from spardl.sync.plan import Member, plan_model

WORKERS, PHASES, COMPARED = 4, 20, 100
SLACK = 0.05  # by which memory may grow in the second half, beside what allocators keep
SLACK_MB = 8.0

# What a phase changes to: method, groups, density.
WAYS: tuple[dict[str, Any], ...] = (
    {"method": "spardl", "groups": "model"},
    {"method": "exdyna", "groups": 2000},
    {"method": "oktopk", "groups": "model", "density": 0.05},
    {"method": "deft", "groups": 3000},
    {"method": "topka", "groups": 500},
    {"method": "gtopk", "groups": "model"},
    {"method": "dense", "groups": 2000},
    {"method": "topkdsa", "groups": 2000, "values": "int8"},
    {"method": "micro", "groups": "model"},
    {"method": "spardl", "groups": 1000, "density": 0.5},
)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    options.add_argument("--steps", type=int, default=10_000)
    steps = options.parse_args().steps
    if "RANK" in os.environ:
        soak(steps)
    else:
        run_ranks([sys.executable, "-m", "benchmarks.soak", "--steps", str(steps)], WORKERS)


def soak(steps: int) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)), bucket_cap_mb=0.02
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = spardl.DensitySchedule(0.01, start=0.25, steps=steps // PHASES)
    sync = spardl.attach(
        model, optimizer=optimizer, density=schedule, dense_below=0, merge="omgs", paranoid=COMPARED, timeout=120
    )
    readings, length = [], max(COMPARED, steps // PHASES)
    if rank == 0:
        print(f"{'steps':>6}  {'now':<28} {'ms/step':>7}  {'MB':>6}  {'descriptors':>11}  {'threads':>7}", flush=True)
    for phase in range(-(-steps // length)):
        started = time.perf_counter()
        way = change(sync, phase) if phase else {"method": "spardl", "groups": "merged"}
        for step in range(phase * length, min(steps, (phase + 1) * length)):
            source = torch.Generator().manual_seed(WORKERS * step + rank)
            inputs = torch.randn(16, 64, generator=source)
            optimizer.zero_grad()
            cross_entropy(model(inputs), inputs[:, :10].argmax(1)).backward()
            optimizer.step()
        through_a_file(sync)
        took = (time.perf_counter() - started) / length
        readings.append(most_of_all_ranks())
        if rank == 0:
            name = f"{way['method']}, groups {way['groups']}"
            memory, descriptors, threads = readings[-1]
            done = min(steps, (phase + 1) * length)
            print(
                f"{done:>6}  {name:<28} {1e3 * took:>7.1f}  {memory:>6.0f}  {descriptors:>11.0f}  {threads:>7.0f}",
                flush=True,
            )
    verdict = judge(readings)
    if rank == 0:
        weights = "finite" if all(bool(p.isfinite().all()) for p in model.parameters()) else "not finite"
        compared = f"{-(-sync.stats().total.steps // COMPARED)} comparisons of hashes, all equal"
        print(f"{verdict or 'flat'}; {compared}; weights are {weights}.", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if verdict else 0)


def change(sync: "spardl.SyncHandle", phase: int) -> dict[str, Any]:
    """Synchronise in another way from the next step on, with what waits now."""
    way = {"density": 0.01, **WAYS[phase % len(WAYS)]}
    session = sync.session
    config = spardl.SyncConfig(dense_below=0, **way)
    members = [Member(each.name, each.elements) for plan in session.plan for each in plan.members]
    session.wait()
    session.regroup(plan_model(config, members, WORKERS))
    return way


def through_a_file(sync: "spardl.SyncHandle") -> None:
    """Save the state and go on from it, as a run that was stopped would."""
    file = io.BytesIO()
    torch.save(sync.state_dict(), file)
    file.seek(0)
    sync.session.load_state_dict(torch.load(file, weights_only=True))


def most_of_all_ranks() -> tuple[float, float, float]:
    """Megabytes, descriptors and threads of the rank that has most of each."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    found = torch.tensor([pages * os.sysconf("SC_PAGE_SIZE") / 1e6, descriptors, threads], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    largest: tuple[float, float, float] = tuple(found.tolist())
    return largest


def judge(readings: list[tuple[float, float, float]]) -> str:
    """What has grown from the first half to the second, or nothing. The first phase makes all that is made once."""
    half = len(readings) // 2
    before, after = readings[1 : half + 1], readings[half + 1 :]
    if not before or not after:
        return ""
    grown = []
    for position, name in enumerate(("memory", "descriptors", "threads")):
        first, second = (max(each[position] for each in part) for part in (before, after))
        limit = first * (1 + SLACK) + SLACK_MB if name == "memory" else first
        if second > limit:
            grown.append(f"{name} grew from {first:.0f} to {second:.0f}")
    return ", ".join(grown)


if __name__ == "__main__":
    main()
