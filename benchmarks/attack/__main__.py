"""Attack runs, and see whether every fault is named rightly and nothing is lost.

    python -m benchmarks.attack --trials 400            all kinds, seeds 0 to 399
    python -m benchmarks.attack --seed 17 --trials 1    the trial of seed 17 again
    python -m benchmarks.attack --seconds 60            as many as fit
    python -m benchmarks.attack --from FILE FILE        the table of what was found before, and no trial

As root each rank has a host of its own, whose line can be cut; otherwise all share one.

Prints a line for each trial that went wrong, and a table of kinds and outcomes. Exit code 1 if anything did.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch is imported, which logs what it raises

INSIDE = "SPARDL_ATTACK"


def main() -> NoReturn:
    options = parser().parse_args()
    if options.found:
        conclude(options, read(options.found), hosts=not options.loopback)
    from benchmarks.attack.lab import can_have_hosts

    hosts = can_have_hosts() and not options.loopback
    if hosts and INSIDE not in os.environ:
        sys.exit(enter())
    from benchmarks.attack.lab import Hosts, Loopback

    conclude(options, carry_out(options, Hosts() if hosts else Loopback()), hosts)


def read(paths: "list[str]") -> "list[Finding]":  # type: ignore[name-defined] # noqa: F821
    """What was found before. Of a seed that was tried twice, the later trial counts."""
    from benchmarks.attack.trial import Finding

    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    findings = [Finding.from_dict(json.loads(line)) for line in lines]
    return sorted({each.trial.seed: each for each in findings}.values(), key=lambda each: each.trial.seed)


def conclude(options: argparse.Namespace, findings: "list[Finding]", hosts: bool) -> NoReturn:  # type: ignore[name-defined] # noqa: F821
    """Show the table, write the page."""
    from benchmarks.attack.table import page, table

    print(table(findings))
    if options.page:
        Path(options.page).write_text(page(findings, Path(options.page), hosts))
    sys.exit(0 if all(each.is_fine for each in findings) else 1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--trials", type=int, default=400, metavar="N", help="at most so many (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=3600.0, help="begin no trial after this (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of the first trial; each has the next one")
    made.add_argument("--only", metavar="TEXT", default="", help="kinds whose name contains this")
    made.add_argument("--timeout", type=float, default=3.0, help="of the runs (default: %(default)s s)")
    made.add_argument("--untimed", action="store_true", help="do not judge how long an error took: on a busy machine")
    made.add_argument("--loopback", action="store_true", help="all ranks on one host, and no faults of lines")
    made.add_argument("--json", metavar="FILE", help="append what was found, a line for every trial, when it is over")
    made.add_argument("--from", nargs="+", metavar="FILE", dest="found", help="such files: show them, and try nothing")
    made.add_argument("--page", metavar="FILE", help="write the table into this page, between its marks")
    return made


def enter() -> int:
    """Start again in namespaces of our own, whose end is the end of everything in them."""
    inside = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    command = ["unshare", *inside, sys.executable, "-m", "benchmarks.attack", *sys.argv[1:]]
    process = subprocess.Popen(command, env={**os.environ, INSIDE: "1"})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.kill())  # unshare waits for its child whatever else it is told
    return process.wait()


def carry_out(options: argparse.Namespace, lab: "Lab") -> "list[Finding]":  # type: ignore[name-defined] # noqa: F821
    """Trial after trial, while there is time."""
    import torch

    from benchmarks.attack.plan import KINDS, trial_of
    from benchmarks.attack.trial import Attacker
    from spardl import kernels

    kinds = tuple(k for k in KINDS if options.only in k.name and (lab.has_lines or k.what != "link"))
    if not kinds:
        sys.exit(f"no kind of fault is called {options.only!r} here; there are {', '.join(k.name for k in KINDS)}.")
    __import__("torch._dynamo")  # which DDP brings in, so that ranks need not
    kernels.for_device(torch.device("cpu"))
    kernels.load("spardl.transport.direct.exchange")
    attacker, findings, began = Attacker(lab, timed=not options.untimed), [], time.monotonic()
    for seed in range(options.seed, options.seed + options.trials):
        if time.monotonic() - began > options.seconds:
            break
        finding = attacker.attack(trial_of(seed, kinds, options.timeout))
        findings.append(finding)
        if options.json:
            with Path(options.json).open("a") as records:
                records.write(json.dumps(finding.to_dict()) + "\n")
        print(
            f"trial {len(findings)} of {options.trials}, {finding.seconds:.0f} s: {finding.trial.kind}", file=sys.stderr
        )
        for remark in finding.remarks:
            trial = finding.trial
            where = f"{trial.run}, {trial.place} of ranks {list(trial.victims)} of {trial.workers}, step {trial.step}"
            print(f"seed {seed}, {trial.kind} ({where}): {remark}", flush=True)
    return findings


if __name__ == "__main__":
    main()
