"""How good a model is: over the whole test set, each rank testing its share."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spardl._torch_private import batch_norms
from spardl.train.dataset import DataSet
from spardl.train.source import batches

TEST_SEED = 20240513


@torch.no_grad()
def evaluate(model: nn.Module, data: DataSet, batch_size: int = 256, loaders: int = 0) -> dict[str, float]:
    """The task's figures, exact: each example counts once. Collective; every rank gets the same. Changes nothing."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    totals, carried = torch.zeros(data.task.sums, dtype=torch.float64), None
    training = model.training
    model.eval()
    shares = data.test.sweep(rank, workers, batch_size)
    with averaged_statistics(model):
        for batch in batches(data.test, shares, seeds=(TEST_SEED, rank), loaders=loaders):
            sums, carried = data.task.measure(model, batch, carried)
            totals = totals + sums
    model.train(training)
    dist.all_reduce(totals)
    return data.task.figures(totals)


@contextlib.contextmanager
def averaged_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm's running statistics are the mean over ranks. Collective.

    Ranks normalise with the statistics of their own batches, and DDP is told to leave the running ones alone: copying
    rank 0's over the others' at every forward, as it would, costs a message per step and throws away what they saw. So
    each rank gathers its own, and where a model is judged or handed out, all ranks take their mean: the same model
    everywhere, which has seen all the data. Afterwards each has its own again, so looking changes nothing.
    """
    own = [(statistic, statistic.clone()) for statistic in _running_statistics(model)]
    if own:
        together = torch.cat([statistic.flatten() for statistic, _ in own])
        dist.all_reduce(together)
        together /= dist.get_world_size()
        parts = together.split([statistic.numel() for statistic, _ in own])
        for (statistic, _), mean in zip(own, parts, strict=True):
            statistic.copy_(mean.view_as(statistic))
    try:
        yield
    finally:
        for statistic, before in own:
            statistic.copy_(before)


def _running_statistics(model: nn.Module) -> list[Tensor]:
    found = [statistic for norm in batch_norms(model) for statistic in (norm.running_mean, norm.running_var)]
    return [statistic for statistic in found if statistic is not None]
