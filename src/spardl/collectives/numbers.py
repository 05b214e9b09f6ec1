"""All-gather of a few whole numbers: counts, boundaries, histograms."""

from collections.abc import Sequence

import numpy as np
import torch

from spardl.collectives.program import Program, Team
from spardl.errors import ProtocolError
from spardl.sparse import Ints


def all_gather_numbers(team: Team, numbers: Sequence[int] | Ints, name: str = "numbers") -> Program[Ints]:
    """Every member's numbers (as many from each) as rows, in member order: ceil(log2 m) rounds by Bruck's doubling."""
    mine = np.asarray(numbers, np.int64)
    assert not mine.size or np.abs(mine).max() < 2**31, "these travel in 32 bits"
    rows = mine.astype(np.int32).reshape(1, -1)  # row i belongs to member (position + i) mod m
    width = rows.shape[1]
    while len(rows) < team.size:
        gap = len(rows)
        count = min(gap, team.size - gap)
        frame = rows[:count].copy().view(np.uint8).reshape(-1)
        size = count * width * 4
        (received,) = yield team.exchange(frame, to=-gap, source=gap, capacity=size, name=name)
        if len(received) != size:
            raise ProtocolError(
                f"rank {team.member(gap)} sent {len(received)} bytes of numbers instead of {size}.",
                peer=team.member(gap),
            )
        rows = np.concatenate((rows, torch.as_tensor(received).cpu().numpy().view(np.int32).reshape(count, width)))
    return np.roll(rows, team.position, axis=0).astype(np.int64)
