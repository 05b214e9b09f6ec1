"""Rivals at work: DDP with torch's own hooks, and an account of what they send."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from spardl.integrations.handle import SyncHandle
from spardl.metrics import GroupStats, SyncStats
from spardl.transport.ring import ring_amount, ring_steps

# With several buckets PowerSGD's hook starts all-reduces from gloo's threads in another order on every rank.
ONE_BUCKET_MB = 1 << 20
NEVER = 1 << 30  # steps from line to line of its log
DENSE_STARTS = 2  # steps that torch's PowerSGD makes densely before it begins


class Rival(SyncHandle):
    """A hook of torch's on a DDP model, where `attach` would be. Bytes are counted as of rings, from bucket sizes."""

    def __init__(self, name: str, model: DistributedDataParallel, workers: int) -> None:
        self.name, self.workers = name, workers
        self._total = GroupStats(name, sum(parameter.numel() for parameter in model.parameters()), dense=True)
        self._group = model.process_group
        self._low_rank: PowerSGDState | None = None
        if name.startswith("powersgd-"):
            rank = int(name.removeprefix("powersgd-"))
            self._low_rank = PowerSGDState(
                None,
                matrix_approximation_rank=rank,
                start_powerSGD_iter=DENSE_STARTS,
                compression_stats_logging_frequency=1 << 30,
            )
        model.register_comm_hook(None, self._hook)

    def _hook(self, _: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        elements = bucket.buffer().numel()
        if bucket.is_last():
            self._total.steps += 1
        if self._low_rank is None:
            size = 2 if self.name == "fp16" else 4
            self._count(elements, size, collectives=1)
            return (fp16_compress_hook if size == 2 else allreduce_hook)(self._group, bucket)
        if self._low_rank.iter < DENSE_STARTS:
            self._count(elements, 4, collectives=1)
            return powerSGD_hook(self._low_rank, bucket)
        before = self._low_rank.total_numel_after_compression
        future = powerSGD_hook(self._low_rank, bucket)
        self._count(self._low_rank.total_numel_after_compression - before, 4, collectives=3)
        return future

    def _count(self, elements: int, size: int, *, collectives: int) -> None:
        sent = int(ring_amount(elements, self.workers))
        self._total.entries += elements
        self._total.entries_sent += sent
        self._total.bytes_sent += size * sent
        self._total.rounds += collectives * ring_steps(self.workers)

    def stats(self) -> SyncStats:
        return SyncStats([self._total])


def buckets_for(name: str) -> dict[str, Any]:
    """How DDP is to wrap a model for this rival."""
    return {"bucket_cap_mb": ONE_BUCKET_MB} if name.startswith("powersgd-") else {}
