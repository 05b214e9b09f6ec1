"""Everything that docs/performance.md is made from: runs each benchmark and keeps its records. Needs root.

    python -m benchmarks.suite                     all of them, in under 30 minutes
    python -m benchmarks.suite --only kernels,memory
    python -m benchmarks.suite --list              what there is, with the commands

Each benchmark writes its records to RESULTS/NAME.json and what it printed to RESULTS/NAME.txt; runs.json says with
which command and in how many seconds. `python -m benchmarks.report` makes the page of them, also without measuring
again.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spardl.bench.match import sends_everything
from spardl.collectives.methods.registry import METHODS

RESULTS = Path("benchmarks/results")
LONGEST_S = 600.0
PICTURE = "{picture}"  # stands for a file beside the records

# What people would choose from. In the three main settings everybody takes part; where the line is slow, of those that
# send everything only torch's own.
TWO = ("--methods", "dense,spardl")
SOME = ("--methods", "dense,topka,oktopk,spardl", "--rivals", "all")
EVERYBODY = ("--methods", "all", "--rivals", "all")
SPARSE = ",".join(name for name in METHODS if name == "dense" or not sends_everything(name))
ALL_SPARSE = ("--methods", SPARSE, "--rivals", "all")
VGG16 = ("--model", "vgg16")
VGG19 = ("--model", "vgg19")


@dataclass(frozen=True)
class Job:
    """One benchmark. With `hosts`, it runs as one rank on each of so many, whose lines have this `rate`."""

    name: str
    title: str
    program: tuple[str, ...]
    hosts: int = 0
    rate: str = ""
    expected_s: int = 60

    def command(self, results: Path) -> list[str]:
        """As a person would type it."""
        lab = ["python", "-m", "benchmarks.netlab", "--hosts", str(self.hosts), "--rate", self.rate, "--"]
        known = ["--rate", self.rate] if self.rate and "benchmarks.overlap" not in self.program else []
        words = [str(results / f"{self.name}.png") if word == PICTURE else word for word in self.program]
        return [*(lab if self.hosts else []), *words, *known, "--json", str(results / f"{self.name}.json")]


def bench(*options: str) -> tuple[str, ...]:
    return ("spardl", "bench", *options)


def program(name: str, *options: str) -> tuple[str, ...]:
    return ("python", "-m", f"benchmarks.{name}", *options)


def turns(repetitions: int, warmup: int = 1) -> tuple[str, ...]:
    return ("--repetitions", str(repetitions), "--warmup", str(warmup))


JOBS = (
    Job("duel-4-1gbit", "dense and spardl, 4 hosts at 1 Gbit/s", bench(*VGG16, *TWO, *turns(21, 2)), 4, "1gbit", 40),
    Job("duel-4-200mbit", "dense and spardl, 4 hosts at 200 Mbit/s", bench(*VGG16, *TWO, *turns(9)), 4, "200mbit", 60),
    Job("duel-8-200mbit", "dense and spardl, 8 hosts at 200 Mbit/s", bench(*VGG16, *TWO, *turns(9)), 8, "200mbit", 75),
    Job("sync-4-1gbit", "all methods, 4 hosts at 1 Gbit/s", bench(*VGG16, *EVERYBODY, *turns(7, 2)), 4, "1gbit", 95),
    Job(
        "sync-4-200mbit", "all methods, 4 hosts at 200 Mbit/s", bench(*VGG16, *ALL_SPARSE, *turns(5)), 4, "200mbit", 80
    ),
    Job(
        "sync-8-200mbit", "all methods, 8 hosts at 200 Mbit/s", bench(*VGG16, *ALL_SPARSE, *turns(4)), 8, "200mbit", 130
    ),
    Job(
        "sizes",
        "gradients from ten thousand to thirty million elements",
        bench("--elements", "1e4,1e5,1e6,1e7,3e7", *SOME, *turns(5)),
        4,
        "1gbit",
        90,
    ),
    Job("rate-100mbit", "lines of 100 Mbit/s", bench(*VGG16, *SOME, *turns(2)), 4, "100mbit", 65),
    Job("rate-5gbit", "lines of 5 Gbit/s", bench(*VGG16, *SOME, *turns(7)), 4, "5gbit", 40),
    Job("workers-2", "2 hosts", bench(*VGG16, *SOME, *turns(7)), 2, "200mbit", 60),
    Job("workers-16", "16 hosts", bench(*VGG16, *TWO, *turns(3)), 16, "200mbit", 70),
    Job(
        "densities",
        "densities from 10 % to 0.01 %",
        bench(*VGG16, "--densities", "0.1,0.01,0.001,0.0001", *SOME, *turns(2)),
        4,
        "200mbit",
        110,
    ),
    Job(
        "formats",
        "formats of values",
        bench(*VGG16, "--methods", "dense,spardl", "--values", "fp32,bf16,fp16,int8", *turns(5)),
        4,
        "200mbit",
        45,
    ),
    Job(
        "models",
        "gradients of models by name",
        bench(
            "--model",
            "resnet20,resnet50,bert-base",
            "--methods",
            "dense,spardl",
            "--rivals",
            "fp16,powersgd-4",
            *turns(2),
        ),
        4,
        "1gbit",
        75,
    ),
    *(
        Job(
            f"delay-{delay}",
            f"every message {delay} later",
            bench("--elements", "1e6", "--latency", delay, *SOME, *turns(7)),
            4,
            "1gbit",
            25,
        )
        for delay in ("1ms", "5ms", "20ms")
    ),
    Job("latency", "one small message", program("latency", "--workers", "2", "4", "8"), expected_s=40),
    Job(
        "kernels",
        "selecting and packing on one thread",
        program("kernels", "--elements", "14728266", "1e6", "5e7", "--repetitions", "11"),
        expected_s=45,
    ),
    Job(
        "memory",
        "memory for a gradient of BERT-large's size",
        program("memory", "--model", "bert-large"),
        expected_s=40,
    ),
    Job(
        "train-vgg16",
        "training steps of VGG-16",
        program("endtoend", *VGG16, "--batch-size", "4", "--rounds", "2"),
        4,
        "200mbit",
        180,
    ),
    Job(
        "train-lstm",
        "training steps of an LSTM",
        program("endtoend", "--model", "lstm-small", "--batch-size", "1"),
        4,
        "200mbit",
        105,
    ),
    Job(
        "overlap",
        "groups that overlap with backward",
        program("overlap", *VGG19, "--batch-size", "2", "--density", "0.05", "--rounds", "2", "--picture", PICTURE),
        4,
        "100mbit",
        190,
    ),
)

# For a look at whether everything works: the same jobs on little.
QUICK_SIZES = {
    "vgg16": "resnet20",
    "vgg19": "resnet20",
    "1e4,1e5,1e6,1e7,3e7": "1e4,1e5",
    "resnet20,resnet50,bert-base": "resnet20",
    "bert-large": "resnet50",
    "14728266": "1e6",
    "1e6": "1e5",
    "5e7": "1e4",
}
QUICK_OPTIONS = {
    "bench": ("--repetitions", "2", "--warmup", "1"),
    "benchmarks.latency": ("--turns", "3"),
    "benchmarks.kernels": ("--repetitions", "3"),
    "benchmarks.endtoend": ("--rounds", "1"),
    "benchmarks.overlap": ("--rounds", "2", "--steps", "2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--only", metavar="NAMES", help="these benchmarks, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small gradients and few turns: does it work at all")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    options = parser.parse_args()
    jobs = chosen(options.only)
    if options.quick:
        jobs = [quick(job) for job in jobs]
    if options.list:
        for job in jobs:
            print(f"{job.name}: {job.title}, about {job.expected_s} s\n    {shown(job, options.results)}")
        return
    check(jobs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("suite: stopped."))  # through `finally`
    options.results.mkdir(parents=True, exist_ok=True)
    sys.exit(run_all(jobs, options.results))


def chosen(names: str | None) -> list[Job]:
    if names is None:
        return list(JOBS)
    known = {job.name: job for job in JOBS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            sys.exit(f"suite: there is no benchmark {name!r}; choose from {', '.join(known)}.")
    return [known[name] for name in wanted]


def quick(job: Job) -> Job:
    words = tuple(QUICK_SIZES.get(word, word) for word in job.program)
    few = next((options for name, options in QUICK_OPTIONS.items() if name in words), ())
    return replace(job, program=(*words, *few), expected_s=20)


def check(jobs: list[Job]) -> None:
    """Refuse before the work what would fail in its midst."""
    if any(job.hosts for job in jobs) and os.geteuid() != 0:
        sys.exit(
            "suite: the network of hosts is made of network namespaces, which needs root; use sudo, or --only with"
            f" {', '.join(job.name for job in JOBS if not job.hosts)}."
        )


def run_all(jobs: list[Job], results: Path) -> int:
    """One after the other, for they share the cores. One that fails does not keep the others from running."""
    expected = sum(job.expected_s for job in jobs)
    print(f"{len(jobs)} benchmarks, about {expected / 60:.0f} minutes. Leave the machine alone meanwhile.", flush=True)
    (results / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    began, failed = time.monotonic(), []
    for number, job in enumerate(jobs, start=1):
        print(f"[{number:2}/{len(jobs)}] {job.title} (about {job.expected_s} s) ... ", end="", flush=True)
        seconds, code = run(job, results)
        print(f"{seconds:.0f} s" if code == 0 else f"FAILED, see {results / job.name}.txt", flush=True)
        if code:
            failed.append(job.name)
        else:
            keep(job, results, seconds)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes in all.")
    if failed:
        print(f"Failed: {', '.join(failed)}. Run them again with --only {','.join(failed)}.")
    return 1 if failed else 0


def run(job: Job, results: Path) -> tuple[float, int]:
    """Seconds and exit code."""
    programs = {"python": [sys.executable], "spardl": [sys.executable, "-m", "spardl"]}
    words = [each for word in job.command(results) for each in programs.get(word, [word])]
    # c10d says at length that hosts without a name have none.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    started = time.monotonic()
    with (results / f"{job.name}.txt").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            print(f"suite: not done after {LONGEST_S:.0f} s.", file=log)
            code = 1
        finally:
            process.terminate()  # if it still runs; a network of hosts takes itself down then
            process.wait()
    return time.monotonic() - started, code


def keep(job: Job, results: Path, seconds: float) -> None:
    """Note how this benchmark was run, beside its records."""
    path = results / "runs.json"
    runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs[job.name] = {
        "title": job.title,
        "command": shown(job, results),
        "seconds": round(seconds, 1),
        "day": time.strftime("%Y-%m-%d"),
    }
    path.write_text(json.dumps(runs, indent=1) + "\n")


def shown(job: Job, results: Path) -> str:
    return shlex.join(job.command(results))


def machine() -> dict[str, Any]:
    import numpy
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


if __name__ == "__main__":
    main()
