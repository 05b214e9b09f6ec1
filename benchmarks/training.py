"""Models at work on made-up data, several ways side by side: what the benchmarks of whole training steps share."""

import contextlib
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from spardl.train.models import build_model
from spardl.train.tasks import Classification, LanguageModel, Task

# Of language models: WikiText-2's vocabulary, and how many tokens a step follows.
VOCABULARY = 33_278
WINDOW = 35

Prepare = Callable[[DistributedDataParallel, SGD], object]


class Training:
    """One way to train a model, with its own copy of it. `prepare` may register a hook and returns what it made.

    Without `synchronised`, ranks go their own ways: what a step takes when nothing is sent. `bucket_mb` is the size of
    DDP's buckets, where it is not the usual one.
    """

    def __init__(
        self,
        model: str,
        batch_size: int,
        prepare: Prepare,
        *,
        synchronised: bool = True,
        bucket_mb: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        built, self._task, self._batch = workload(model, batch_size)
        self.model = DistributedDataParallel(built, bucket_cap_mb=bucket_mb)
        self.optimizer = SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.made = prepare(self.model, self.optimizer)
        self.seconds: list[float] = []
        self._around = contextlib.nullcontext if synchronised else self.model.no_sync

    def step(self) -> float:
        started = time.perf_counter()
        with self._around():
            self.optimizer.zero_grad()
            loss, _ = self._task.loss(self.model, self._batch, None)
            loss.backward()
        self.optimizer.step()
        return time.perf_counter() - started

    @property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.model.parameters()]


def workload(name: str, batch_size: int) -> tuple[nn.Module, Task, tuple[Tensor, ...]]:
    """A model, what it is asked to do, and this rank's batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    if name.startswith("lstm-"):
        tokens = torch.randint(VOCABULARY, (batch_size, WINDOW + 1), generator=generator)
        model = build_model(name, {"vocabulary": VOCABULARY})
        return model, LanguageModel(recurrent=True), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    labels = torch.randint(10, (batch_size,), generator=generator)
    if name == "mlp":
        layers = [layer for _ in range(23) for layer in (nn.Linear(512, 512), nn.ReLU())]
        inputs = torch.randn(batch_size, 512, generator=generator)
        return nn.Sequential(*layers, nn.Linear(512, 10)), Classification(), (inputs, labels)
    images = torch.randn(batch_size, 3, 32, 32, generator=generator)
    return build_model(name, {"classes": 10, "channels": 3}), Classification(), (images, labels)


def take_turns(runs: Mapping[str, Training], *, warmup: int, rounds: int, steps: int) -> None:
    """`steps` of each in turn, `rounds` times, so that noise hits all alike. The times are of the slowest rank."""
    for run in runs.values():
        for _ in range(warmup):
            run.step()
    for _ in range(rounds):
        for run in runs.values():
            dist.barrier()
            run.seconds += [run.step() for _ in range(steps)]
    for run in runs.values():
        slowest = torch.tensor(run.seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        run.seconds = slowest.tolist()
