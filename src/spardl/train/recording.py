"""`--record-gradients`: what each worker's own gradients are, for the simulator to replay."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spardl.errors import ConfigError
from spardl.simulator.gradients import save
from spardl.train.run import Run
from spardl.train.source import Batch

MOST_BYTES = 4e9


class GradientRecorder:
    """Keeps every worker's gradient of the first `steps` steps of a run, before anything is synchronised.

    A recorded step computes its gradient twice: once for the record, without an exchange, and once as always. The run
    goes on as if nothing had been recorded, BatchNorm's statistics included. Rank 0 holds all of it until the last
    recorded step, and then writes it.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._steps = steps
        self._kept: list[Tensor] = []

    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Record this step, if it is one of them. Collective."""
        if self._steps <= len(self._kept):
            return
        own = _own_gradient(run, batches)
        if self._steps * run.workers * own.numel() * own.element_size() > MOST_BYTES:
            raise ConfigError(
                f"gradients of {self._steps} steps of {run.workers} workers with {own.numel():,} elements are more than"
                f" {MOST_BYTES / 1e9:g} GB; record fewer steps."
            )
        everyone = [torch.empty_like(own) for _ in range(run.workers)] if run.rank == 0 else None
        dist.gather(own, everyone)
        self._kept.append(torch.stack(everyone) if everyone is not None else own[:0])
        if len(self._kept) == self._steps and run.rank == 0:
            save(self._path, torch.stack(self._kept))
            self._kept = [each[:0] for each in self._kept]


def _own_gradient(run: Run, batches: list[Batch]) -> Tensor:
    """The gradient of this rank's own batches, flat, in the order of the parameters."""
    buffers = [buffer.clone() for buffer in run.module.buffers()]
    random, carried = torch.get_rng_state(), run.carried
    run.optimizer.zero_grad()
    with run.without_exchange():
        for batch in batches:
            loss, carried = run.data.task.loss(run.model, batch, carried)
            (loss / len(batches)).backward()
    flat = torch.cat([_flat(parameter) for parameter in run.module.parameters()])
    run.optimizer.zero_grad()
    torch.set_rng_state(random)
    with torch.no_grad():
        for buffer, before in zip(run.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return flat


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    return torch.zeros(parameter.numel()) if gradient is None else gradient.detach().float().flatten()
