"""Threads that share the blocks of a loop, where there are cores for them."""

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


class Crew:
    """So many threads, the caller's among them. Loops let go of Python's lock, so they run side by side.

    crowded  ranks share cores: while one waits another works, so there is no time to be used meanwhile
    """

    def __init__(self, size: int = 1, *, crowded: bool = False) -> None:
        self.size, self.crowded = size, crowded
        self._others = ThreadPoolExecutor(size - 1, thread_name_prefix="spardl-crew") if size > 1 else None

    def share(self, job: Callable[[Bools], bool], wanted: Bools) -> bool:
        """Do the `job` of the wanted blocks, each thread for some of them. Whether it went well for all."""
        if self._others is None:
            return job(wanted)
        blocks = np.flatnonzero(wanted)
        shares = [np.isin(np.arange(wanted.size), some) for some in np.array_split(blocks, self.size) if some.size]
        others = [self._others.submit(job, some) for some in shares[1:]]
        return all([job(shares[0]), *(other.result() for other in others)]) if shares else True


def crew_of_rank(gather: Callable[[str], list[str]]) -> Crew:
    """As many threads as each rank has cores to itself, and no more than torch may use. Collective."""
    cores = min(cores_each(gather))
    return Crew(max(1, min(torch.get_num_threads(), int(cores))), crowded=cores < 1)


def cores_each(gather: Callable[[str], list[str]]) -> list[float]:
    """Every rank's share of the cores of its machine, in rank order. Collective."""
    known = [json.loads(text) for text in gather(json.dumps([_machine(), _cores()]))]
    sharing = Counter(machine for machine, _ in known)
    return [cores / sharing[machine] for machine, cores in known]


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine() -> str:
    """What ranks on one machine have in common, whatever containers or addresses they have."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return os.uname().nodename
