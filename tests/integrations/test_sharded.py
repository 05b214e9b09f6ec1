"""Handles in checkpoints of `torch.distributed.checkpoint`: one folder, in which every rank finds its own."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import spardl
from processes import on_processes
from sharding import HOOKED, parts, sharded, whole
from training import EXACT, mlp, sgd, train

# What its fixture starts is started once, not once per process that runs tests.
pytestmark = pytest.mark.xdist_group("sharded")

SETTINGS = {
    "local": {"update": "local", "delay": 1, "outer": "nesterov", "outer_rate": 0.5},
    "gradients": {},
    "ddp": {},
    "backward": {"when": "backward"},
}


def started(shape, way):
    """A model in shape[1] parts, or with DDP."""
    settings = {**EXACT, "density": 0.05, **SETTINGS[way]}
    if way == "ddp":
        model = DistributedDataParallel(mlp())
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh["shard"])
        settings["replicate"] = mesh["replicate"]
    optimizer = AdamW(model.parameters(), lr=1e-2) if way == "local" else sgd(model, momentum=0.9)
    if way == "backward":
        optimizer = sgd(model)
    return model, optimizer, spardl.attach(model, optimizer=optimizer, **settings)


def save(folder, model, optimizer, sync):
    with sync.shared():
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save({**state, "sync": sync.sharded()}, checkpoint_id=folder)


def load(folder, model, optimizer, sync):
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    dcp.load({"sync": sync.sharded(folder)}, checkpoint_id=folder)


def _tensors(tree):
    """All tensors and numbers in a state, in order."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in _tensors(tree[key])]
    if isinstance(tree, list):
        return [leaf for each in tree for leaf in _tensors(each)]
    return [torch.as_tensor(tree)] if isinstance(tree, torch.Tensor | int | float) else []


def _resume(rank, workers, folder, ways):
    found = {}
    for way in ways:
        model, optimizer, sync = started((2, workers // 2), way)
        train(model, optimizer, range(4))
        optimizer.zero_grad()
        before = _tensors(sync.state_dict())
        save(folder / way, model, optimizer, sync)
        for mine, theirs in zip(before, _tensors(sync.state_dict()), strict=True):
            assert torch.equal(mine, theirs), "saving has changed something"
        train(model, optimizer, range(4, 7))
        uninterrupted = parts(model)
        model, optimizer, sync = started((2, workers // 2), way)
        load(folder / way, model, optimizer, sync)
        train(model, optimizer, range(4, 7))
        found[way] = uninterrupted, parts(model)
    return found


def test_a_model_in_parts_resumes_exactly(tmp_path):
    ways = ["local", "gradients", *(["backward"] if HOOKED else [])]
    for found in on_processes(4, _resume, tmp_path, ways):
        for way, (uninterrupted, resumed) in found.items():
            assert torch.equal(uninterrupted, resumed), way


def _resume_whole(rank, workers, folder):
    return _resume(rank, workers, folder, ["ddp", "local"])


def test_a_model_that_every_rank_has_whole_resumes_exactly(tmp_path):
    for found in on_processes(2, _resume_whole, tmp_path):
        for way, (uninterrupted, resumed) in found.items():
            assert torch.equal(uninterrupted, resumed), way


# --- another layout ---------------------------------------------------------------------------------------------------


def _facts(model, sync):
    with sync.shared():
        shared = whole(model)
    return {"shared": shared, "own": whole(model), "residuals": sync.state_dict()["residuals"]}


def _train_and_save(rank, workers, folder):
    found = {}
    for way in ("local", "gradients"):
        model, optimizer, sync = started((2, 2), way)
        train(model, optimizer, range(4))
        save(folder / way, model, optimizer, sync)
        found[way] = _facts(model, sync)
    return found


def _load_elsewhere(rank, workers, folder, shape):
    found = {}
    for way in ("local", "gradients"):
        model, optimizer, sync = started(shape, way)
        load(folder / way, model, optimizer, sync)
        found[way] = _facts(model, sync)
        train(model, optimizer, range(4, 6))
        assert parts(model).isfinite().all() and sync.stats().skipped == 0
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two replicas in two parts each, and the folder where they are."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, on_processes(4, _train_and_save, folder)


@pytest.mark.parametrize("shape", [pytest.param((3, 2), marks=pytest.mark.slow), (1, 3)], ids=str)
def test_other_replicas_and_parts_go_on_with_the_same_weights_and_the_mean_of_what_waits(saved, shape):
    folder, before = saved
    after = on_processes(shape[0] * shape[1], _load_elsewhere, folder, shape)
    for way in ("local", "gradients"):
        for each in after:
            assert torch.equal(each[way]["shared"], before[0][way]["shared"]), way
    for each in after:
        mean = torch.stack([before[0]["local"]["own"], before[2]["local"]["own"]]).mean(0)
        torch.testing.assert_close(each["local"]["own"], mean, rtol=1e-6, atol=1e-7)
    for name in before[0]["gradients"]["residuals"]:
        old, new = _mean_residual(before, (2, 2), name), _mean_residual(after, shape, name)
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-8)


def _mean_residual(ranks, shape, name):
    """Over replicas, of all parts."""
    found = [each["gradients"]["residuals"].get(name, torch.empty(0)) for each in ranks]
    replicas = [torch.cat(found[first : first + shape[1]]) for first in range(0, len(found), shape[1])]
    assert len(replicas) == shape[0]
    return torch.stack(replicas).mean(0)


# --- what cannot work -------------------------------------------------------------------------------------------------


def _refuse(rank, workers, folder):
    model, optimizer, sync = started((2, 1), "local")
    train(model, optimizer, range(2))
    before, texts = parts(model), []
    dcp.save({"sync": sync.sharded()}, checkpoint_id=folder / "good")
    damaged = sync.sharded().state_dict()
    damaged[f"replica {rank}"]["part 0"]["rest"] = b"no state"
    for attempt in (
        lambda: dcp.save({"sync": sync}, checkpoint_id=folder / "direct"),
        lambda: sync.sharded(folder / "good", key="other"),
        lambda: sync.sharded().load_state_dict(damaged),
    ):
        try:
            attempt()
            texts.append("went through")
        except spardl.StateError as error:
            texts.append(str(error))
    return texts, torch.equal(before, parts(model))


def test_a_handle_itself_another_key_and_a_damaged_state_are_refused(tmp_path):
    for texts, unchanged in on_processes(2, _refuse, tmp_path):
        for text, part in zip(texts, ["sync.sharded()", "'other'", "damaged"], strict=True):
            assert part in text, text
        assert unchanged
