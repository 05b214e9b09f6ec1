"""The machine that this process runs on: its cores, which ranks share them, and what it only claims."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
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


# A virtual machine may announce AMX and have none. Up to this set of instructions oneDNN, torch's library for matrices,
# goes without it.
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
_AMX = "amx_bf16"
_CPUINFO = Path("/proc/cpuinfo")
_MULTIPLY = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def claims_amx_in_vain(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process that multiplies matrices of bfloat16 is killed here, as it is where AMX is announced and is not
    there. Tried in a process of its own, for some seconds, and only where AMX is announced."""
    if not (_CPUINFO.exists() and _AMX in _CPUINFO.read_text()):
        return False
    return subprocess.run([sys.executable, "-c", _MULTIPLY], env=environment, stderr=subprocess.DEVNULL).returncode < 0
