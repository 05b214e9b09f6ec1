"""`torch.compile`, and copies of the model: `deepcopy`, `AveragedModel`, `torch.save(model)`.

Promised: it does not matter where `torch.compile` stands, in training nor in a checkpoint, whose names are those of the
model that was compiled. A model to which spardl is attached can be copied and pickled as before; the copy is a plain
DDP model that spardl knows nothing of, and the original does not notice.
"""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

import spardl
from processes import on_processes
from scripts.twice import Attach, assert_close, assert_trains_like_plain_ddp
from training import loss_of, mlp, weights_of

# What its fixtures start is started once, not once per process that runs tests.
pytestmark = pytest.mark.xdist_group("copies")


def steps(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def momentum_sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


# --- torch.compile ----------------------------------------------------------------------------------------------------


# This backend runs what was captured as it is, so compiled models compute the very bits of others.
compiled = partial(torch.compile, backend="eager")


@pytest.fixture(scope="module")
def _compiler() -> None:
    """Its first use imports for seconds: once here, rather than in every process."""
    with torch.enable_grad():
        compiled(mlp())(torch.zeros(1, 20)).sum().backward()


MODELS: dict[str, Callable[[], Any]] = {
    "not compiled": lambda: DistributedDataParallel(mlp()),
    "compiled, then wrapped": lambda: DistributedDataParallel(compiled(mlp())),
    "wrapped, then compiled": lambda: compiled(DistributedDataParallel(mlp())),
}


def train_compiled(attach: Attach, where: str) -> Tensor:
    model = MODELS[where]()
    optimizer = momentum_sgd(model)
    attach(model, optimizer=optimizer)
    steps(model, optimizer, 0, 8)
    return weights_of(model)


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("where", ["compiled, then wrapped", pytest.param("wrapped, then compiled")])
def test_a_compiled_model_trains_like_plain_ddp(where: str) -> None:
    """Also where groups start during backward, for which spardl looks at every forward."""
    assert_trains_like_plain_ddp(partial(train_compiled, where=where), {}, {"groups": 1000})


def resume_elsewhere(rank: int, workers: int, where: str) -> tuple[list[str], list[bool]]:
    """Names in the state of a compiled run; whether it goes on elsewhere, bit for bit, and another one here."""
    names: list[str] = []
    same: list[bool] = []
    for kinds in ((where, "not compiled"), ("not compiled", where)):
        models = [MODELS[kind]() for kind in kinds]
        optimizers = [momentum_sgd(model) for model in models]
        syncs = [
            spardl.attach(model, optimizer=optimizer, density=0.05, timeout=30)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        steps(models[0], optimizers[0], 0, 4)
        names = sorted(syncs[0].state_dict()["residuals"])
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            mine.data.copy_(theirs.data)
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        syncs[1].load_state_dict(syncs[0].state_dict())
        for model, optimizer in zip(models, optimizers, strict=True):
            steps(model, optimizer, 4, 8)
        same.append(torch.equal(weights_of(models[0]), weights_of(models[1])))
    return names, same


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("compiled, then wrapped"),
        pytest.param("wrapped, then compiled"),
    ],
)
def test_a_checkpoint_does_not_tell_whether_the_model_was_compiled(where: str) -> None:
    """So either kind of run resumes the other."""
    expected = sorted(name for name, _ in mlp().named_parameters())
    for names, same in on_processes(2, resume_elsewhere, where):
        assert names == expected
        assert same == [True, True]


# --- copies -----------------------------------------------------------------------------------------------------------


def through_a_file(model: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: DistributedDataParallel = torch.load(file, weights_only=False)
    return loaded


def averaged(model: DistributedDataParallel) -> DistributedDataParallel:
    average = AveragedModel(model)
    average.update_parameters(model)
    copied: DistributedDataParallel = average.module
    return copied


COPY: dict[str, Callable[[DistributedDataParallel], DistributedDataParallel]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": averaged,
    "torch.save": through_a_file,
}


def copied(rank: int, workers: int, way: str) -> dict[str, Tensor]:
    """Copy a model in the middle of training, use the copy, and train on."""
    found: dict[str, Tensor] = {}
    for disturbed in (False, True):
        model = DistributedDataParallel(mlp())
        optimizer = momentum_sgd(model)
        spardl.attach(model, optimizer=optimizer, density=0.05, groups=1000, timeout=30)
        steps(model, optimizer, 0, 4)
        if disturbed:
            duplicate = COPY[way](model)
            found["weights of the copy"], found["weights at the copy"] = weights_of(duplicate), weights_of(model)
            duplicate.zero_grad()
            loss_of(duplicate, rank, 99).backward()
            found["gradient of the copy"] = torch.cat([each.grad.flatten() for each in duplicate.parameters()])
            fresh = DistributedDataParallel(copy.deepcopy(model.module))
            fresh.zero_grad()
            loss_of(fresh, rank, 99).backward()
            found["gradient of plain DDP"] = torch.cat([each.grad.flatten() for each in fresh.parameters()])
        steps(model, optimizer, 4, 8)
        found["disturbed" if disturbed else "undisturbed"] = weights_of(model)
    return found


@pytest.mark.parametrize("way", COPY)
def test_a_copy_is_a_plain_ddp_model_and_the_original_does_not_notice(way: str) -> None:
    for rank, found in enumerate(on_processes(2, copied, way)):
        assert torch.equal(found["weights of the copy"], found["weights at the copy"])
        assert_close(found["gradient of the copy"], found["gradient of plain DDP"], f"rank {rank}")
        assert torch.equal(found["disturbed"], found["undisturbed"])
