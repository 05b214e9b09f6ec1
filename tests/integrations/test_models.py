"""Models that DDP treats in special ways: unused, frozen, tied, tiny, mixed, permuted and sparse parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spardl
from processes import on_processes
from training import EXACT, all_equal, batch, loss_of, lost_in_a_step, mlp, residuals_of, sgd, total, train, weights_of


class Branches(nn.Module):
    """A trunk, and branches of which each step uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(20, 30)
        self.branches = nn.ModuleDict({name: nn.Linear(30, 5) for name in "abc"})

    def forward(self, inputs: Tensor, use: str) -> Tensor:
        hidden = self.trunk(inputs).relu()
        return sum((self.branches[name](hidden) for name in use), hidden[:, :5])


def branch_loss(rank: int, step: int, use: str) -> Callable[[nn.Module], Tensor]:
    inputs, labels = batch(rank, step)
    return lambda model: cross_entropy(model(inputs, use), labels)


def skipped(rank: int, workers: int) -> dict[str, Any]:
    """b is used by all ranks, then by none, then by rank 1 only; c never is."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    sync = spardl.attach(model, optimizer=False, density=0.05, **EXACT)
    b, c = (model.module.branches[name].weight for name in "bc")
    lost, kept, gradients = [], [], []
    for step, use in enumerate(["ab", "ab", "a", "ab" if rank == 1 else "a", "ab"]):
        lost.append(lost_in_a_step(model, sync, branch_loss(rank, step, use)))
        kept.append(residuals_of(sync)["branches.b.weight"])
        gradients.append(None if b.grad is None else b.grad.clone())
    return {"lost": lost, "kept": kept, "gradients": gradients, "never": c.grad}


def test_what_no_rank_used_waits_and_what_some_rank_used_is_applied() -> None:
    """A residual is not sent where DDP would drop it, and one rank that uses a parameter is enough to apply it."""
    ranks = on_processes(2, skipped)
    for found in ranks:
        assert max(found["lost"]) < 1e-5, f"lost per step: {found['lost']}"
        assert found["never"] is None
        assert found["gradients"][2] is None
        assert torch.equal(found["kept"][1], found["kept"][2])
        assert found["kept"][1].any()
        assert found["gradients"][3].any()
    assert all_equal(found["gradients"][3] for found in ranks)
    assert not torch.equal(ranks[0]["kept"][2], ranks[0]["kept"][3]), "rank 0 did not use it, but its residual may go"


def skipped_with_momentum(rank: int, workers: int) -> tuple[Tensor, Tensor]:
    weights = []
    for attached in (False, True):
        model = DistributedDataParallel(Branches(), find_unused_parameters=True)
        optimizer = sgd(model, momentum=0.9, weight_decay=0.01, dampening=0.2)
        if attached:
            spardl.attach(model, optimizer=optimizer, density=1.0)
        for step, use in enumerate(["a", "ab", "a", "ab" if rank == 1 else "a", "ab", "ab"]):
            optimizer.zero_grad()
            branch_loss(rank, step, use)(model).backward()
            optimizer.step()
        weights.append(weights_of(model))
    return weights[0], weights[1]


def test_momentum_of_partly_used_parameters_is_that_of_plain_sgd() -> None:
    """At density 1, a parameter that only some ranks or some steps use gets the momentum and decay SGD gives it."""
    for plain, attached in on_processes(2, skipped_with_momentum):
        assert torch.allclose(plain, attached, atol=1e-6)


def static(rank: int, workers: int) -> tuple[list[float], bool, Tensor]:
    model = DistributedDataParallel(Branches(), static_graph=True, bucket_cap_mb=0.002)
    sync = spardl.attach(model, optimizer=False, density=0.05, groups="bucket", **EXACT)
    lost = [lost_in_a_step(model, sync, branch_loss(rank, step, "ab")) for step in range(4)]
    decaying = DistributedDataParallel(Branches(), static_graph=True)
    sync = spardl.attach(decaying, optimizer=sgd(decaying, weight_decay=0.1), density=0.05, **EXACT)
    for step in range(2):
        branch_loss(rank, step, "ab")(decaying).backward()
    return lost, model.module.branches["c"].weight.grad is None, residuals_of(sync)["branches.c.weight"]


def test_a_static_graph_with_an_unused_branch_loses_nothing() -> None:
    """With static_graph, whose buckets change a step later than usual, unused parameters stay without gradient.

    Nor does weight decay reach what is not used, as it does not in plain training.
    """
    for lost, untouched, decayed in on_processes(2, static):
        assert max(lost) < 1e-5, f"lost per step: {lost}"
        assert untouched
        assert not decayed.any()


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 5)]
    return nn.Sequential(nn.Unflatten(1, (2, 5, 5)), *layers).to(memory_format=torch.channels_last)


def image_loss(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    inputs, labels = torch.randn(8, 50, generator=source), torch.randint(0, 5, (8,), generator=source)
    return lambda model: cross_entropy(model(inputs), labels)


def permuted(rank: int, workers: int) -> tuple[list[float], Tensor, Tensor]:
    model = DistributedDataParallel(conv_net())
    sync = spardl.attach(model, optimizer=False, density=0.1, **EXACT)
    lost = [lost_in_a_step(model, sync, image_loss(rank, step)) for step in range(4)]
    weights = []
    for attached in (False, True):
        model = DistributedDataParallel(conv_net())
        optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
        for step in range(8):
            if step == 4:  # by then there are momentum buffers to take over; of other strides, as some checkpoints have
                for state in optimizer.state.values():
                    state["momentum_buffer"] = state["momentum_buffer"].contiguous()
                if attached:
                    spardl.attach(model, optimizer=optimizer, density=1.0)
            optimizer.zero_grad()
            image_loss(rank, step)(model).backward()
            optimizer.step()
        weights.append(weights_of(model))
    return lost, weights[0], weights[1]


def test_channels_last_parameters_keep_their_coordinates() -> None:
    """Residuals, weight decay and momentum of a permuted parameter meet the gradient at the right elements."""
    for lost, plain, attached in on_processes(2, permuted):
        assert max(lost) < 1e-5, f"lost per step: {lost}"
        assert torch.allclose(plain, attached, atol=1e-6)


class Mixed(nn.Module):
    """bfloat16, float64 and float32 layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(20, 30).bfloat16()
        self.wide = nn.Linear(30, 30).double()
        self.normal = nn.Linear(30, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.normal(self.wide(self.narrow(inputs.bfloat16()).relu().double()).relu().float())


def mixed(rank: int, workers: int) -> dict[str, Any]:
    model = DistributedDataParallel(Mixed())
    sync = spardl.attach(model, optimizer=False, density=0.1, **EXACT)
    lost = [lost_in_a_step(model, sync, lambda m, step=step: loss_of(m, rank, step)) for step in range(3)]
    dtypes = {name: (p.grad.dtype, residuals_of(sync)[name].dtype) for name, p in model.module.named_parameters()}
    all_narrow = DistributedDataParallel(mlp().bfloat16())
    optimizer = sgd(all_narrow, momentum=0.9)
    spardl.attach(all_narrow, optimizer=optimizer, density=0.1, dense_below=0)
    for step in range(5):
        inputs, labels = batch(rank, step)
        optimizer.zero_grad()
        cross_entropy(all_narrow(inputs.bfloat16()), labels).backward()
        optimizer.step()
    return {"lost": lost, "dtypes": dtypes, "narrow": weights_of(all_narrow)}


def test_parameters_of_several_dtypes_share_a_group() -> None:
    """Gradients keep their types, residuals are float32, ranks agree; rounding to bfloat16 is all that is lost."""
    ranks = on_processes(2, mixed)
    for found in ranks:
        assert max(found["lost"]) < 0.01, "more than bfloat16 rounds away"
        assert found["dtypes"]["narrow.weight"] == (torch.bfloat16, torch.float32)
        assert found["dtypes"]["wide.weight"] == (torch.float64, torch.float32)
    assert all_equal(found["narrow"] for found in ranks)


class Words(nn.Module):
    """A sparse embedding in front of dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 20, sparse=True)
        self.body = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.embedding(inputs))


def words(rank: int, workers: int) -> tuple[Tensor, Tensor, Tensor]:
    weights = []
    for density in (None, 1.0, 0.05):
        model = DistributedDataParallel(Words())
        optimizer = sgd(model)
        if density is not None:
            spardl.attach(model, optimizer=optimizer, density=density, **EXACT)
        for step in range(5):
            source = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            inputs, labels = torch.randint(50, (8,), generator=source), torch.randint(5, (8,), generator=source)
            cross_entropy(model(inputs), labels).backward()
            assert model.module.embedding.weight.grad.is_sparse
            optimizer.step()
        weights.append(weights_of(model))
    return weights[0], weights[1], weights[2]


def test_sparse_embeddings_are_averaged_beside_the_rest() -> None:
    """Gradients that are sparse already are averaged as they are: at density 1 all ends as with plain DDP."""
    ranks = on_processes(2, words)
    for plain, attached, _ in ranks:
        assert torch.allclose(plain, attached, atol=1e-6)
    assert all_equal(sparse for _, _, sparse in ranks)


class Tied(nn.Module):
    """Two layers that are one parameter, a parameter without elements, and one with gaps in its memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 5)
        self.second.weight = self.first.weight
        self.nothing = nn.Parameter(torch.empty(0))
        self.gaps = nn.Parameter(torch.randn(20, 40)[:, ::2].t())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs).relu() @ self.gaps).relu()) + self.nothing.sum()


def odd_models(rank: int, workers: int) -> dict[str, Any]:
    """Each is trained to see that no step fails; what it lost, how sparse it was, and whether it moved."""
    found = {}
    tiny = nn.Sequential(nn.Linear(20, 1, bias=False), nn.Flatten(0), nn.Unflatten(0, (-1, 1)), nn.Linear(1, 5))
    models: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "tied": (Tied(), EXACT),
        "few": (nn.Sequential(nn.Unflatten(1, (20, 1)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Scale()), EXACT),
        "small": (tiny, {**EXACT, "dense_below": 1024}),
    }
    for name, (module, settings) in models.items():
        model = DistributedDataParallel(module)
        sync = spardl.attach(model, optimizer=False, density=0.1, **settings)
        lost = [lost_in_a_step(model, sync, lambda m, step=step: loss_of(m, rank, step)) for step in range(3)]
        stats = sync.stats().total
        found[name] = (lost, stats.dense, stats.density)
    weights = []
    for attached in (False, True):
        model = DistributedDataParallel(Tied())
        optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
        if attached:
            spardl.attach(model, optimizer=optimizer, density=1.0)
        train(model, optimizer, range(4))
        weights.append(weights_of(model))
    found["difference"] = float((weights[0] - weights[1]).abs().max() / weights[0].abs().max())
    return found


class Scale(nn.Module):
    """Two parameters in all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight.sum() * torch.arange(5) * self.weight[0]


def test_tied_empty_few_and_small_parameters_lose_nothing() -> None:
    """Tied weights count once; fewer parameters than workers work; a group below `dense_below` goes dense.

    At density 1 their momentum and decay are plain SGD's, whatever their memory looks like.
    """
    for found in on_processes(4, odd_models):
        assert found.pop("difference") < 1e-6
        for name, (lost, _, _) in found.items():
            assert max(lost) < 1e-5, f"{name}: lost {lost}"
        assert not found["tied"][1]
        assert found["tied"][2] == pytest.approx(0.1, rel=0.1)
        assert found["small"][1:] == (True, 1.0)


def frozen(rank: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for when in ("before attach", "after attach"):
        model = DistributedDataParallel(mlp(), find_unused_parameters=True)
        layer = model.module[0]
        if when == "before attach":
            layer.requires_grad_(False)
        sync = spardl.attach(model, optimizer=False, density=0.1, **EXACT)
        layer.requires_grad_(False)
        lost = [lost_in_a_step(model, sync, lambda m, step=step: loss_of(m, rank, step)) for step in range(2)]
        layer.requires_grad_(True)
        lost += [lost_in_a_step(model, sync, lambda m, step=step: loss_of(m, rank, step)) for step in range(2, 4)]
        assert layer.weight.grad is not None
        found[when] = (lost, total(layer.weight.grad) / workers - layer.weight.grad)
    return found


def test_layers_may_be_frozen_and_thawed_after_wrapping() -> None:
    """What DDP wrapped is synchronised whenever it has a gradient, frozen at attach or later."""
    for found in on_processes(2, frozen):
        for when, (lost, difference) in found.items():
            assert max(lost) < 1e-5, f"frozen {when}: lost {lost}"
            assert not difference.any(), "ranks got different gradients"


def thawed_too_late(rank: int, workers: int) -> None:
    module = mlp()
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module)
    module[0].requires_grad_(True)
    spardl.attach(model, optimizer=False, timeout=10)
    loss_of(model, rank, 0).backward()


def test_a_layer_that_ddp_does_not_know_is_an_error() -> None:
    """A layer that was frozen when DDP wrapped it would train apart on each rank; the error names it."""
    for kind, text in on_processes(2, thawed_too_late, expect="any"):
        assert kind == "raised"
        assert text.startswith("StateError: '0.bias' was not submitted in this step")
        assert "DDP does not synchronise what was frozen when the model was wrapped" in text
