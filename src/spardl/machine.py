"""The machine that this process runs on: its cores, and which ranks share them."""

import os
from collections import Counter
from pathlib import Path

from spardl.agreement import Gather, gather_values


def cores_per_rank(gather: Gather) -> float:
    """Cores that every rank has to itself at least; below 1 where ranks take turns on them. Collective."""
    return min(cores_each(gather))


def cores_each(gather: Gather) -> list[float]:
    """Every rank's share of the cores of its machine, in rank order. Collective."""
    known = gather_values(gather, [boot_id(), cores()])
    sharing = Counter(machine for machine, _ in known)
    return [count / sharing[machine] for machine, count in known]


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def boot_id() -> str:
    """What ranks on one machine have in common, whatever containers or addresses they have; its name where the kernel
    does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return os.uname().nodename
