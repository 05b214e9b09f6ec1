"""Some steps of a method on one rank: what transports are held against each other with."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spardl.config import SyncConfig
from spardl.sync.plan import Member, plan_group
from spardl.sync.session import Session
from spardl.transport.base import Transport

LENGTH = 3000
STEPS = 3


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * step + rank)) ** 3


def synchronized(transport: Transport, config: SyncConfig) -> dict[str, Any]:
    """Every result, the residual, and what was moved for it."""
    plan = plan_group(replace(config, dense_below=0), [Member("vector", LENGTH)], max(2, transport.workers))
    session = Session(transport, config, [plan], commit="group")
    before = transport.traffic.copy()
    results = []
    for step in range(STEPS):
        results.append(gradient(transport.rank, step))
        assert session.reduce("vector", results[-1])
    after = transport.traffic
    moved = (after.rounds - before.rounds, after.messages - before.messages, after.bytes_sent - before.bytes_sent)
    return {"results": results, "residual": session.state_dict()["residuals"]["vector"], "moved": moved}
