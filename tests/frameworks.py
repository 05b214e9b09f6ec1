"""What tests of frameworks have in common: processes as torchrun starts them, and a small data set."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset

from processes import on_processes
from spardl.extras import is_installed
from training import mlp

# How updates, optimizers and precisions are combined: all of them must resume exactly.
WAYS = [
    ("local", "adamw", "fp16"),
    ("gradients", "sgd", "fp32"),
    pytest.param("gradients", "sgd", "fp16", marks=pytest.mark.slow),
    pytest.param("local", "sgd", "fp32", marks=pytest.mark.slow),
    pytest.param("gradients", "adamw", "bf16", marks=pytest.mark.slow),
]
EXACT = {"dense_below": 0, "density": 0.05, "timeout": 30}


def needs(module: str) -> pytest.MarkDecorator:
    """Skip what needs a framework that is not installed."""
    return pytest.mark.skipif(not is_installed(module), reason=f"needs {module}: pip install {module}")


def as_torchrun(workers: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`on_processes`, with the variables that torchrun sets."""
    return on_processes(workers, _with_variables, function, *arguments)


def _with_variables(rank: int, workers: int, function: Callable[..., Any], *arguments: Any) -> Any:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in {**ranks, **sizes, **place}.items()})
    return function(rank, workers, *arguments)


def as_on_devices() -> None:
    """Accelerate takes an `fsdp_plugin` on devices only, and otherwise DDP, without a word. Here it takes it."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    usual = AcceleratorState.__init__

    def begin(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        usual(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin


def scaler_for(update: str, rank: int) -> torch.amp.GradScaler:
    """A scaler for half precision on a CPU, which frameworks make on GPUs only.

    With gradients it begins so high that all ranks skip the first steps. With local updates ranks' scales differ.
    """
    scale = 2.0**24 if update == "gradients" else 2.0 ** (8 + 2 * rank)
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs with labels that a model can learn."""

    def __init__(self, count: int = 96) -> None:
        source = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 20, generator=source)
        self.labels = self.inputs[:, :5].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def optimizer_for(model: nn.Module, name: str) -> Optimizer:
    if name == "sgd":
        return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return AdamW(model.parameters(), lr=1e-2)


def loss_on(model: nn.Module, samples: Samples) -> float:
    with torch.no_grad():
        return float(cross_entropy(model(samples.inputs), samples.labels))


def start_loss() -> float:
    return loss_on(mlp(), Samples())
