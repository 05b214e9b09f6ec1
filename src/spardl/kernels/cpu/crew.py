"""Threads that share the blocks of a loop, where there are cores for them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from spardl.kernels.api import Bools


class Crew:
    """`size` threads, the caller's among them. Loops let go of Python's lock, so they run side by side.

    crowded  ranks share cores: while one waits another works, so there is no time to be used meanwhile
    """

    def __init__(self, size: int = 1, *, crowded: bool = False) -> None:
        self.size, self.crowded = size, crowded
        self._others = ThreadPoolExecutor(size - 1, thread_name_prefix="spardl-crew") if size > 1 else None

    @classmethod
    def for_cores(cls, cores: float) -> "Crew":
        """As many threads as a rank has cores to itself, and no more than torch may use."""
        return cls(max(1, min(torch.get_num_threads(), int(cores))), crowded=cores < 1)

    def share(self, job: Callable[[Bools], bool], wanted: Bools) -> bool:
        """Do the `job` of the wanted blocks, each thread for some of them; return whether it went well for all."""
        if self._others is None:
            return job(wanted)
        blocks = np.flatnonzero(wanted)
        shares = [np.isin(np.arange(wanted.size), some) for some in np.array_split(blocks, self.size) if some.size]
        others = [self._others.submit(job, some) for some in shares[1:]]
        return all([job(shares[0]), *(other.result() for other in others)]) if shares else True
