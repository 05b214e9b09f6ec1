"""Steps of a synchronised model reach a dashboard, TensorBoard, Weights & Biases and torch's profiler."""

import importlib
import json
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

import spardl
from frameworks import needs
from processes import on_processes
from spardl.integrations.observers import Logged, TensorBoard, in_words
from spardl.transport.words import Silence, Standing
from training import mlp, sgd, train


def _train(rank: int, workers: int, folder: Path) -> dict:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = spardl.attach(model, optimizer=optimizer, update="local", density=0.1)
    board = sync.dashboard()
    written, logged = [], []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            written.append((tag, global_step))

    sync.observe(TensorBoard(Writer(), every=2))
    sync.observe(Logged(logged.append))
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 40)).square().mean()
        loss.backward()
        optimizer.step()
        board.log(step, loss=loss.item())
    sync.stats()  # waits until nothing is under way
    with urllib.request.urlopen(board.url + "data.json", timeout=10) as answer:
        data = json.loads(answer.read())
    torch.distributed.barrier()  # everybody has looked before anybody goes
    board.export(folder / f"{rank}.html")
    board.close()
    return {"data": data, "written": written, "logged": logged}


def test_every_step_is_told_to_all_who_asked(tmp_path: Path) -> None:
    for rank, told in enumerate(on_processes(2, _train, tmp_path)):
        data = told["data"]
        assert data["title"] == f"spardl, rank {rank} of 2"
        assert data["steps"] == 4 and data["failure"] is None
        assert [step for step, _ in data["curves"]["loss"]] == [0, 1, 2, 3]
        assert len(data["curves"]["bytes sent"]) == 4
        assert all(waited > 0 for _, waited in data["curves"]["exposed seconds"])
        assert sum(group["elements"] for group in data["groups"]) == 40 * 30 + 30
        assert [each["spardl/step"] for each in told["logged"]] == [0, 1, 2, 3]
        assert [step for tag, step in told["written"] if tag == "spardl/density"] == [0, 2]
        assert [words for _, words in data["ranks"]][rank] == "computes"  # it was this rank that was asked
        assert {state for state, _ in data["ranks"]} <= {"fine", "waits"}
        timeline = data["timeline"]
        assert timeline["step"] == 3 and [name for name, _, _ in timeline["spans"]] == [data["groups"][0]["name"]]
        assert all(0 <= begins <= ends <= timeline["seconds"] for _, begins, ends in timeline["spans"])
        assert "data-live" in (tmp_path / f"{rank}.html").read_text(encoding="utf-8")


def test_what_a_rank_says_of_itself_is_told_in_a_few_words() -> None:
    assert in_words(Standing()) == ("fine", "computes")
    assert in_words(Standing((1, 2), 3.21)) == ("waits", "has waited 3.2 s for 1, 2")
    assert in_words(Standing(blames=2)) == ("bad", "has left because of rank 2")
    assert in_words(Silence.GONE) == ("bad", "is gone")
    assert in_words(Silence.UNKNOWN)[0] == "unknown"


# --- loggers of others ------------------------------------------------------------------------------------------------


def _log(rank: int, workers: int, kind: str, folder: Path) -> list[float]:
    """What the logger itself has kept of four steps."""
    model = mlp()
    optimizer = sgd(model)
    sync = spardl.attach(model, optimizer=optimizer, update="local", density=0.1, dense_below=0)
    return LOGGERS[kind](sync, lambda: train(model, optimizer, range(4)), folder / str(rank))


def _tensorboard(sync, steps, folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        sync.observe(TensorBoard(writer))
        steps()
    kept = EventAccumulator(str(folder))
    kept.Reload()
    return [each.value for each in kept.Scalars("spardl/bytes_sent")]


def _weights_and_biases(sync, steps, folder: Path) -> list[float]:
    import wandb

    folder.mkdir()
    settings = wandb.Settings(console="off", silent=True)
    with wandb.init(project="spardl", mode="offline", dir=folder, settings=settings) as run:
        logged: list[float] = []
        sync.observe(Logged(run.log))
        sync.observe(lambda event: logged.append(run.summary["spardl/bytes_sent"]))
        steps()
        assert run.summary["spardl/step"] == 3
    (kept,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"spardl/exchange_seconds" in kept.read_bytes()
    return logged


LOGGERS = {"tensorboard": _tensorboard, "wandb": _weights_and_biases}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("tensorboard", marks=needs("tensorboard")),
        pytest.param("wandb", marks=[needs("wandb"), pytest.mark.slow]),
    ],
)
def test_a_logger_keeps_every_step(kind: str, tmp_path: Path) -> None:
    """As its own files have them; Weights & Biases offline."""
    importlib.import_module({"tensorboard": "torch.utils.tensorboard"}.get(kind, kind))
    for kept in on_processes(2, _log, kind, tmp_path):
        assert len(kept) == 4 and all(value > 0 for value in kept)


# --- torch's profiler -------------------------------------------------------------------------------------------------

LANES = ("accumulate", "select", "exchange", "average", "commit")


def _profile(rank: int, workers: int, folder: Path) -> dict[str, set[int]]:
    """On which threads each of our lanes was seen, in the trace that a person would open."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    spardl.attach(model, optimizer=optimizer, density=0.1, dense_below=0, groups=1000)
    train(model, optimizer, range(1))
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler:
        train(model, optimizer, range(1, 3))
    profiler.export_chrome_trace(str(folder / f"{rank}.json"))
    events = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
    return {lane: {each["tid"] for each in events if each.get("name") == f"spardl::{lane}"} for lane in LANES}


def test_a_profile_of_all_threads_shows_our_lanes(tmp_path: Path) -> None:
    """Gradients are added up on one thread, and all else happens on another."""
    try:
        _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("the profiler of this torch cannot look at all threads")
    for found in on_processes(2, _profile, tmp_path):
        assert all(len(threads) == 1 for threads in found.values()), found
        assert found["accumulate"] != found["exchange"] == found["select"] == found["average"] == found["commit"]
