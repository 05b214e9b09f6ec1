"""Some steps of a method on one rank, by hand: what transports are held against each other with."""

from typing import Any

import torch
from torch import Tensor

from spardl.accumulator import Accumulator
from spardl.collectives.memory import Memory
from spardl.collectives.method import Place, method_class
from spardl.config import SyncConfig
from spardl.transport.base import Transport, run
from spardl.wire.frame import Codec

LENGTH = 3000
STEPS = 3


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * step + rank)) ** 3


def synchronized(transport: Transport, config: SyncConfig) -> dict[str, Any]:
    """Every result, the residual, and what was moved for it."""
    method = method_class(config.method)(Place(transport.rank, transport.workers, LENGTH, config))
    acc = Accumulator(method.layout, residuals=config.residuals)
    memory = Memory(acc, Codec(config.values, config.indices))
    before = transport.traffic.copy()
    results = []
    for step in range(STEPS):
        (acc.add_later if method.about.by_blocks else acc.add)(0, gradient(transport.rank, step))
        result = run(method.synchronize(memory, config.density_at(step)), transport)
        total = torch.zeros(LENGTH)
        if result is None:
            acc.read(0, total)
        else:
            acc.settle(result)
            positions, values = acc.natural(result)
            total.numpy()[positions] = values
        acc.commit(dense=result is None)
        results.append(total)
    residual = torch.empty(LENGTH)
    acc.read(0, residual)
    after = transport.traffic
    moved = (after.rounds - before.rounds, after.messages - before.messages, after.bytes_sent - before.bytes_sent)
    return {"results": results, "residual": residual, "moved": moved}
