"""The code of docs/how-to.md runs as it stands, and does what the page says."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spardl
from processes import on_processes
from sharding import parts
from training import all_equal, mlp, weights_of

PAGE = Path(__file__).parent.parent / "docs" / "how-to.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
GAN, GAN_WITH_DDP, CHECKPOINT, FSDP, HALF, AVERAGE = BLOCKS


def judged(scores: Tensor, *, real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def run(script: str, rank: int, **more: Any) -> dict[str, Any]:
    """All names that are there when a block has run."""
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(rank)
    names: dict[str, Any] = {
        "MyModel": mlp,
        "Generator": lambda: nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 20)),
        "Judge": lambda: nn.Sequential(nn.Linear(20, 30), nn.LeakyReLU(0.2), nn.Linear(30, 1)),
        "data": [torch.randn(8, 20, generator=source) for _ in range(5)],
        "judged": judged,
        "loss_of": loss_of,
        "device": "cpu",
    }
    known = (torch, dist, dcp, spardl, get_model_state_dict, set_model_state_dict, init_device_mesh, fully_shard)
    known = (*known, DistributedDataParallel, AveragedModel, get_ema_multi_avg_fn)
    names |= {each.__name__.rpartition(".")[2]: each for each in known}
    names |= {"dcp": dcp, "dist": dist, **more}
    exec(script, names)
    return names


def _all(rank: int, workers: int, folder: Path) -> dict[str, Tensor | bool]:
    found: dict[str, Tensor | bool] = {}
    for name, script in {"gan": GAN, "gan with ddp": GAN_WITH_DDP}.items():
        names = run(script, rank)
        found[name] = torch.cat([weights_of(names["generator"]), weights_of(names["judge"])])
    names = run(HALF, rank)
    names["sync"].flush()
    found["half"] = weights_of(names["model"])
    found["average"] = weights_of(run(AVERAGE, rank)["average"])
    names = run(FSDP, rank)
    loss_of(names["model"], names["data"][0]).backward()
    names["optimizer"].step()
    names["sync"].flush()
    found["fsdp"] = parts(names["model"])
    found["goes on"] = _goes_on(rank, folder)
    return found


def _goes_on(rank: int, folder: Path) -> bool:
    first, second = (run(CHECKPOINT, rank, folder=folder) for _ in range(2))

    def train(names: dict[str, Any], steps: int) -> None:
        for batch in names["data"][:steps]:
            names["optimizer"].zero_grad()
            loss_of(names["model"], batch).backward()
            names["optimizer"].step()

    train(first, 3)
    first["save"](3)
    assert second["load"]() == 3
    for each in (first, second):
        train(each, 2)
    return torch.equal(weights_of(first["model"]), weights_of(second["model"]))


def test_every_block_trains_and_ends_with_one_model(tmp_path: Path) -> None:
    """And a checkpoint goes on with each rank's own weights, bit for bit."""
    ranks = on_processes(2, _all, tmp_path)
    for name in ("gan", "gan with ddp", "half", "average", "fsdp"):
        assert all_equal(found[name] for found in ranks), name
        assert ranks[0][name].isfinite().all()
    assert all(found["goes on"] for found in ranks)
