"""The training loop: one recipe, one way to synchronise, on the ranks of an existing process group."""

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from spardl.config import SyncConfig
from spardl.integrations.ddp import SyncHandle, attach
from spardl.train.data import Examples
from spardl.train.recipes import Recipe
from spardl.train.settings import TrainSettings

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class EpochReport:
    """One epoch: training loss over all ranks, accuracy and loss on the whole test set, time without the test."""

    epoch: int
    train_loss: float
    test_loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class TrainReport:
    """One run. Bytes and rounds are this rank's, per step. Density is what was asked for at the end, and what came."""

    recipe: str
    method: str
    workers: int
    settings: TrainSettings
    config: SyncConfig
    parameters: int
    steps: int
    seconds: float
    bytes_per_step: float
    rounds_per_step: float
    bits_per_entry: float
    density: float
    achieved_density: float
    epochs: list[EpochReport] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return self.epochs[-1].accuracy

    @property
    def test_loss(self) -> float:
        return self.epochs[-1].test_loss

    @property
    def train_loss(self) -> float:
        return self.epochs[-1].train_loss

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        return {
            **{name: value for name, value in record.items() if name not in ("settings", "config", "epochs")},
            "accuracy": self.accuracy,
            "test_loss": self.test_loss,
            "train_loss": self.train_loss,
            "settings": record["settings"],
            "config": record["config"],
            "epochs": record["epochs"],
        }


class Observer(Protocol):
    """Who watches a run, on any rank."""

    def begin(self, method: str, epochs: int, steps: int) -> None:
        """A run of `epochs` times `steps` steps starts."""

    def step(self) -> None: ...

    def epoch(self, report: EpochReport) -> None: ...


def train(recipe: Recipe, settings: TrainSettings, config: SyncConfig, observer: Observer) -> TrainReport:
    """Train from scratch; every rank calls it and gets the same report, apart from its own traffic.

    Deterministic: the same arguments on the same number of ranks give the same weights.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    data = recipe.load_data()
    steps = data.steps_per_epoch(workers, settings.batch_size)
    model = DistributedDataParallel(recipe.build_model())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=settings.epochs * steps)
    sync = attach(model, optimizer=optimizer, config=config)
    test_shard = data.test.shard(rank, workers)

    observer.begin(config.method, settings.epochs, steps)
    epochs = []
    for epoch in range(settings.epochs):
        dist.barrier()
        started = time.perf_counter()
        model.train()
        loss_sum = torch.zeros((), dtype=torch.float64)
        for batch in data.batches(rank, workers, settings.batch_size, seed=settings.seed, epoch=epoch):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch.inputs), batch.labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach()
            observer.step()
        seconds = time.perf_counter() - started
        dist.all_reduce(loss_sum)
        test_loss, accuracy = evaluate(model.module, test_shard)
        report = EpochReport(epoch + 1, loss_sum.item() / (steps * workers), test_loss, accuracy, seconds)
        observer.epoch(report)
        epochs.append(report)
    return _report(recipe, settings, config, model, sync, steps * settings.epochs, epochs)


@torch.no_grad()
def evaluate(model: nn.Module, shard: Examples) -> tuple[float, float]:
    """Mean loss and accuracy over the shards of all ranks together: exact, each example counts once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in shard.in_batches(EVALUATION_BATCH):
        scores: Tensor = model(batch.inputs)
        totals[0] += cross_entropy(scores, batch.labels, reduction="sum")
        totals[1] += (scores.argmax(dim=1) == batch.labels).sum()
        totals[2] += len(batch)
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    return (loss / count, correct / count) if count else (math.nan, math.nan)


def _report(
    recipe: Recipe,
    settings: TrainSettings,
    config: SyncConfig,
    model: nn.Module,
    sync: SyncHandle,
    steps: int,
    epochs: list[EpochReport],
) -> TrainReport:
    total = sync.stats().total
    return TrainReport(
        recipe=recipe.name,
        method=config.method,
        workers=dist.get_world_size(),
        settings=settings,
        config=config,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=steps,
        seconds=sum(report.seconds for report in epochs),
        bytes_per_step=total.bytes_sent / steps,
        rounds_per_step=total.rounds / steps,
        bits_per_entry=total.bits_per_entry,
        density=1.0 if total.dense else config.density_at(steps),
        achieved_density=total.density,
        epochs=epochs,
    )
