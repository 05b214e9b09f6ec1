"""Tensor-parallel models: parts by columns and rows, and what every rank of a replica has whole."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import spardl
from processes import on_processes
from sharding import parts
from spardl.integrations.parts import part_of
from training import EXACT, all_equal, loss_of, mlp, sgd, weights_of


def _reference():
    """Both replicas' gradients, averaged by hand."""
    model = mlp()
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(model, replica, step) / 2).backward()
        optimizer.step()
    return weights_of(model)


def _whole(model):
    found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in found])


def _train(rank, workers):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    replica = mesh["replicate"].get_local_rank()
    found = {"reference": _reference()}
    for name, settings in {"local": {"update": "local"}, "gradients": {}}.items():
        for density in (1.0, 0.05):
            model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            optimizer = sgd(model)
            sync = spardl.attach(
                model, optimizer=optimizer, replicate=mesh["replicate"], density=density, **settings, **EXACT
            )
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, replica, step).backward()
                optimizer.step()
            kinds = [len(plan.members) for plan in sync.plan]
            with sync.shared():
                found[name, density] = _whole(model), parts(model)
            found[name, density, "own copies"] = torch.cat(
                [part_of(each).detach().flatten() for each in (model[2].bias, *model[4].parameters())]
            )
    return found, kinds, dist.get_rank()


def test_a_tensor_parallel_model_trains_like_a_whole_one_and_its_copies_stay_copies():
    """What ranks of a replica have in common is grouped apart, so that nothing of one of them decides about it."""
    ranks = on_processes(4, _train)
    for found, kinds, rank in ranks:
        assert kinds == [3, 3]  # last layer and the bias after the rows; the rest
        for name in ("local", "gradients"):
            torch.testing.assert_close(found[name, 1.0][0], found["reference"], rtol=1e-5, atol=3e-6)
            same_part = [other[name, 0.05][1] for other, _, index in ranks if index % 2 == rank % 2]
            assert all_equal(same_part), "replicas differ"
            same_replica = [other[name, 0.05, "own copies"] for other, _, index in ranks if index // 2 == rank // 2]
            assert all_equal(same_replica), "copies within a replica differ"


def _in_two_dimensions(rank, workers):
    """Columns and rows over one dimension, and what that leaves cut up over another."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    replica = mesh["replicate"].get_local_rank()
    found = {"reference": _reference()}
    for name, settings in {"local": {"update": "local"}, "gradients": {}}.items():
        model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh["shard"])
        optimizer = sgd(model)
        try:
            spardl.attach(model, replicate=mesh["replicate"], when="backward", **EXACT)
        except spardl.ConfigError as error:
            found["refused"] = str(error)
        sync = spardl.attach(model, optimizer=optimizer, replicate=mesh["replicate"], density=1.0, **settings, **EXACT)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, replica, step).backward()
            optimizer.step()
        found[name] = _whole(model), [len(plan.members) for plan in sync.plan]
    return found


@pytest.mark.slow
def test_parts_may_be_cut_in_two_dimensions():
    for found in on_processes(8, _in_two_dimensions):
        assert "tensor-parallel" in found["refused"]
        for name in ("local", "gradients"):
            weights, groups = found[name]
            torch.testing.assert_close(weights, found["reference"], rtol=1e-5, atol=3e-6)
            assert groups == [3, 3]
