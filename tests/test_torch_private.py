"""Names that torch keeps private are used in one file, and what they do works in this torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from processes import on_processes
from spardl import _torch_private
from spardl.collectives.program import AllReduce
from spardl.transport.torchdist import TorchTransport

SOURCE = Path(__file__).parent.parent / "src" / "spardl"
THE_FILE = SOURCE / "_torch_private.py"
STANDARD = {"_asdict", "_exit", "_replace"}  # of tuples with names, and of os


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports_torch(tree: ast.AST) -> bool:
    imports = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return any(line.split()[1].startswith("torch") for line in imports)


def names_of_ours(tree: ast.AST) -> Iterator[str]:
    """What a module defines under a private name: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every private attribute that is asked for, also by `getattr` or an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            if isinstance(node.args[1], ast.Constant) and is_private(str(node.args[1].value)):
                yield node.lineno, str(node.args[1].value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def foreign_uses() -> Iterator[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    ours = {name for path, tree in trees.items() if path != THE_FILE for name in names_of_ours(tree)}
    ours |= {path.stem for path in trees}
    allowed = {THE_FILE}
    for path, tree in trees.items():
        if path in allowed or not imports_torch(tree):
            continue
        for line, name in private_uses(tree):
            if name not in ours | STANDARD:
                yield f"{path.relative_to(SOURCE)}:{line} uses {name}; that belongs in _torch_private.py."


def test_private_names_of_torch_are_used_in_one_file() -> None:
    found = list(foreign_uses())
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_looks_for() -> None:
    """All that stands in the one file that may."""
    found = {name for _, name in private_uses(ast.parse(THE_FILE.read_text(encoding="utf-8")))}
    assert {"_get_default_store", "_devices", "_Options", "_execution_engine", "_comm_hooks"} <= found


def test_a_callback_runs_when_backward_is_over() -> None:
    """After all hooks on gradients; and where no backward is under way, nothing is queued."""
    weight = torch.ones(3, requires_grad=True)
    order: list[str] = []

    def on_gradient(_: torch.Tensor) -> None:
        assert _torch_private.after_backward(lambda: order.append("over"))
        order.append("gradient")

    weight.register_hook(on_gradient)
    weight.sum().backward()
    assert order == ["gradient", "over"]
    assert not _torch_private.after_backward(lambda: order.append("never"))
    assert order == ["gradient", "over"]


def hooked(rank: int, workers: int) -> tuple[bool, bool]:
    model = DistributedDataParallel(nn.Linear(2, 2))
    before = _torch_private.has_comm_hook(model)
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    return before, _torch_private.has_comm_hook(model)


def test_a_hook_that_ddp_has_is_seen() -> None:
    assert on_processes(1, hooked) == [(False, True)]


@pytest.mark.parametrize("hidden", [False, True])
def test_batch_norms_of_all_kinds_are_found(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other norms are not, and a torch without the private name has the same ones."""
    if hidden:
        monkeypatch.delattr(nn.modules.batchnorm, "_BatchNorm")
    norms = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    others = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)]
    assert _torch_private.batch_norms(nn.Sequential(*norms, *others)) == norms


def hidden(rank: int, workers: int, name: str) -> tuple[list[str], float, str]:
    """A torch that has lost one of the names."""
    if name == "_Options":
        del dist.ProcessGroupGloo._Options
    else:
        del dist.distributed_c10d._get_default_store
    transport = TorchTransport(timeout=30)
    tensor = torch.ones(1)
    transport.perform(AllReduce(tensor))
    texts = transport.gather_texts(f"rank {rank}")
    kind = type(transport._group).__name__
    transport.close()
    transport.close()
    return texts, float(tensor), kind


@pytest.mark.parametrize("name", ["_Options", "_get_default_store"])
def test_without_the_names_groups_are_made_by_torch(name: str) -> None:
    """They take a thread more, and do all the same."""
    assert on_processes(2, hidden, name) == [(["rank 0", "rank 1"], 2.0, "ProcessGroup")] * 2


def test_the_gloo_behind_a_group_is_found_and_nothing_where_there_is_none() -> None:
    assert on_processes(1, gloo_kinds) == [["ProcessGroupGloo", "NoneType", "NoneType"]]


def gloo_kinds(rank: int, workers: int) -> list[str]:
    found = map(_torch_private.gloo_behind, (dist.group.WORLD, _torch_private.gloo_behind(dist.group.WORLD), None))
    return [type(each).__name__ for each in found]


def test_a_step_that_a_checkpoint_rehearses_is_told_from_one_of_training() -> None:
    """Moments are made by a step with zeros; it comes before the first real one."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(_torch_private.is_rehearsal()))
    get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == [True, False]


def hook_and_none(rank, workers):
    """Gradients of DDP with a hook that spoils them, after it was dropped, and of DDP that never had one."""

    def spoil(state, bucket):
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7.0))
        return future

    plain, dropped = (DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=0.00001) for _ in range(2))
    dropped.module.load_state_dict(plain.module.state_dict())
    dropped.register_comm_hook(None, spoil)
    found = []
    for step in range(4):
        if step == 1:
            assert _torch_private.drop_comm_hook(dropped) and not _torch_private.has_comm_hook(dropped)
        for model in (plain, dropped):
            model.zero_grad()
            model(torch.full((1, 3), float(rank + step))).sum().backward()
        pairs = zip(plain.parameters(), dropped.parameters(), strict=True)
        found.append([torch.equal(a.grad, b.grad) for a, b in pairs])
    dropped.register_comm_hook(None, spoil)
    dropped(torch.ones(1, 3)).sum().backward()
    return found, all(bool((each.grad == 7.0).all()) for each in dropped.parameters())


def test_a_hook_of_ddp_can_be_dropped_and_another_registered() -> None:
    for found, spoilt in on_processes(2, hook_and_none):
        assert found == [[False, False], *[[True, True]] * 3] and spoilt


def kept_hooks(rank, workers):
    """Whether hooks were dropped of models whose reducers know more than can be told to another."""
    unused = DistributedDataParallel(nn.Linear(3, 2), find_unused_parameters=True)
    frozen = DistributedDataParallel(nn.Linear(3, 2))
    frozen.module.bias.requires_grad_(False)
    return [_torch_private.drop_comm_hook(model) for model in (unused, frozen)]


def test_a_hook_stays_where_another_reducer_would_forget_something() -> None:
    assert on_processes(1, kept_hooks) == [[False, False]]
