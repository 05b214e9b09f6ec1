"""How good a selection was."""

import math

import torch
from torch import Tensor

from spardl.host import download


def delta(accumulated: Tensor, positions: Tensor, values: Tensor, count: int) -> float:
    """How much a selection left behind, compared with random choice: 1 is as bad as chance, 0 is nothing left.

    `accumulated` is a sum over ranks, `values` at `positions` are what was applied of it, `count` the entries that each
    rank chose. LAGS (Shi et al., ECAI 2020) proves convergence if it is at most 1. Chance is taken in expectation: k of
    n random entries leave (1 - k/n) of the squared norm.
    """
    total = accumulated.double()
    before = torch.sum(total**2)
    total[positions] -= values.double()
    norm, left = download(torch.stack((before, torch.sum(total**2)))).tolist()
    chance = (1 - min(1.0, count / max(1, total.numel()))) * norm
    if left == 0:
        return 0.0
    return left / chance if chance > 0 else math.inf
