"""FSDP2: parts of a model that are synchronised between replicas, against what torch does on a mesh of two dimensions."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import spardl
from processes import on_processes
from sharding import WORKERS, grid, parts, sharded, whole
from training import EXACT, all_equal, loss_of, mlp, sgd, train

WAYS = {
    "local": {"update": "local"},
    "local, reset": {"update": "local", "apply": "reset"},
    "gradients": {},
    "gradients in backward": {"when": "backward"},
}


def attach(model, optimizer, mesh, **settings):
    return spardl.attach(model, optimizer=optimizer, replicate=mesh["replicate"], **{**EXACT, **settings})


def _as_hsdp(rank, workers, ways):
    mesh = grid()
    theirs = sharded(mesh)
    train(theirs, sgd(theirs), range(5))
    found = {}
    for name, settings in ways.items():
        ours = sharded(mesh["shard"], mlp(seed=0))
        optimizer = sgd(ours)
        attach(ours, optimizer, mesh, density=1.0, **settings)
        train(ours, optimizer, range(5))
        found[name] = whole(ours)
    return whole(theirs), found


def test_at_density_one_every_way_gives_the_weights_of_native_hsdp():
    ranks = on_processes(WORKERS, _as_hsdp, WAYS)
    for name in WAYS:
        assert all_equal(found[name] for _, found in ranks), name
        for theirs, found in ranks:
            torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=3e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023
