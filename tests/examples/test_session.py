"""The lines that docs/architecture.md shows of a session do what it says."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from processes import on_processes
from spardl import Session, SyncConfig
from spardl.sync.plan import Member

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def run_the_lines(rank: int, workers: int, lines: str) -> tuple[bool, Tensor, Tensor]:
    gradients = {
        "gradient_of_w": torch.full((1_000_000,), float(rank)),
        "gradient_of_b": torch.full((1000,), float(rank)),
    }
    names: dict[str, Any] = {"Session": Session, "SyncConfig": SyncConfig, "Member": Member, **gradients}
    exec(lines, names)
    names["session"].end()
    return names["counted"], gradients["gradient_of_w"], gradients["gradient_of_b"]


def test_a_session_averages_what_it_is_given() -> None:
    """One entry in a hundred, the same on both ranks: the average of 0 and 1."""
    (lines,) = re.findall(r"```python\n(session = .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (counted, *mine), (_, *theirs) = on_processes(2, run_the_lines, lines)
    assert counted
    together = torch.cat(mine)
    assert torch.equal(together, torch.cat(theirs))
    assert together.count_nonzero() == 10_010
    assert set(together.unique().tolist()) == {0.0, 0.5}
