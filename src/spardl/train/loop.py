"""The training loop: one recipe, one way to synchronise, on the ranks of an existing process group."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl.config import SyncConfig
from spardl.integrations.ddp import SyncHandle, attach
from spardl.train.data import load_data
from spardl.train.dataset import DataSet
from spardl.train.models import build_model
from spardl.train.recipes import Recipe
from spardl.train.settings import TrainSettings
from spardl.train.source import batches

EVALUATION_BATCH = 256
TEST_SEED = 20240513


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
    data = load_data(recipe.data)
    steps = len(data.train.order(workers, settings.batch_size, seed=settings.seed, epoch=0))
    model = DistributedDataParallel(build_model(recipe.model, data.facts, data.name))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=settings.epochs * steps)
    sync = attach(model, optimizer=optimizer, config=config)

    observer.begin(config.method, settings.epochs, steps)
    epochs = []
    for epoch in range(settings.epochs):
        dist.barrier()
        started = time.perf_counter()
        model.train()
        loss_sum = torch.zeros((), dtype=torch.float64)
        carried = None
        positions = data.train.order(workers, settings.batch_size, seed=settings.seed, epoch=epoch)[:, rank]
        for batch in batches(data.train, positions, seeds=(settings.seed, epoch, rank)):
            optimizer.zero_grad()
            loss, carried = data.task.loss(model, batch, carried)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach()
            observer.step()
        seconds = time.perf_counter() - started
        dist.all_reduce(loss_sum)
        figures = evaluate(model.module, data)
        test_loss, accuracy = figures["loss"], figures["accuracy"]
        report = EpochReport(epoch + 1, loss_sum.item() / (steps * workers), test_loss, accuracy, seconds)
        observer.epoch(report)
        epochs.append(report)
    return _report(recipe, settings, config, model, sync, steps * settings.epochs, epochs)


@torch.no_grad()
def evaluate(model: nn.Module, data: DataSet) -> dict[str, float]:
    """The task's figures over the whole test set, each rank testing its share: exact, each example counts once."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    model.eval()
    totals, carried = torch.zeros(data.task.sums, dtype=torch.float64), None
    for batch in batches(data.test, data.test.sweep(rank, workers, EVALUATION_BATCH), seeds=(TEST_SEED, rank)):
        sums, carried = data.task.measure(model, batch, carried)
        totals = totals + sums
    dist.all_reduce(totals)
    return data.task.figures(totals)


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
