"""States in files, one per rank: loaded exactly, with another number of workers, and not if damaged."""

from pathlib import Path

import pytest
import torch

import spardl
from local_updates import attach, shared_weights
from processes import on_processes
from spardl.integrations import rank_files
from training import all_equal, mlp, sgd, train, weights_of


def _parts(update):
    model = mlp()
    if update == "gradients":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(model, momentum=0.9)
    return model, optimizer, attach(model, optimizer, update=update, density=0.05)


def _save(rank, workers, folder, update="local"):
    model, optimizer, sync = _parts(update)
    train(model, optimizer, range(3))
    path = rank_files.save(sync, folder)
    return weights_of(model), shared_weights(sync, model), path.name


def _load(rank, workers, folder, update="local"):
    model, _, sync = _parts(update)
    rank_files.load(sync, folder)
    return weights_of(model), shared_weights(sync, model), sync.state_dict()["residuals"]


def test_every_rank_gets_back_what_it_has_saved(tmp_path: Path) -> None:
    saved, loaded = on_processes(2, _save, tmp_path), on_processes(2, _load, tmp_path)
    assert [name for _, _, name in saved] == ["spardl-00000-of-00002.pt", "spardl-00001-of-00002.pt"]
    for (own, shared, _), (own_now, shared_now, _) in zip(saved, loaded, strict=True):
        assert torch.equal(own, own_now)
        assert torch.equal(shared, shared_now)


@pytest.mark.parametrize("update", ["local", "gradients"])
def test_another_number_of_workers_begins_at_the_mean(tmp_path: Path, update: str) -> None:
    """All ranks with the same; and when they save into that folder, what the others have left is gone."""
    saved = on_processes(2, _save, tmp_path, update)
    loaded = on_processes(3, _load, tmp_path, update)
    if update == "local":
        assert all(torch.equal(shared, saved[0][1]) for _, shared, _ in loaded)
    else:
        assert all_equal(torch.cat(list(residuals.values())) for _, _, residuals in loaded)
    on_processes(1, _save, tmp_path, update)
    assert [path.name for path in tmp_path.iterdir()] == ["spardl-00000-of-00001.pt"]


def _refused(rank, workers, folder):
    _, _, sync = _parts("local")
    try:
        rank_files.load(sync, folder)
    except spardl.SparDLError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    assert "holds no state of spardl" in on_processes(1, _refused, tmp_path)[0]
    on_processes(2, _save, tmp_path)
    whole = tmp_path / "spardl-00001-of-00002.pt"
    whole.write_bytes(whole.read_bytes()[:100])
    told = on_processes(2, _refused, tmp_path)
    assert told[0] == ""
    assert "cannot be read" in told[1]
    whole.unlink()
    assert "spardl-00001-of-00002.pt" in on_processes(2, _refused, tmp_path)[1]
    assert "another number of workers" in on_processes(1, _refused, tmp_path)[0]
