"""Steps of a synchronised model reach a dashboard, TensorBoard and whatever takes a dictionary."""

import json
import urllib.request
from pathlib import Path

import torch
from torch import nn

import spardl
from processes import on_processes
from spardl.integrations.observers import Logged, TensorBoard


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
        assert sum(group["elements"] for group in data["groups"]) == 40 * 30 + 30
        assert [each["spardl/step"] for each in told["logged"]] == [0, 1, 2, 3]
        assert [step for tag, step in told["written"] if tag == "spardl/density"] == [0, 2]
        assert "data-live" in (tmp_path / f"{rank}.html").read_text(encoding="utf-8")
