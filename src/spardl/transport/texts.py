"""Every rank's text, on any transport that can gather bytes."""

from collections.abc import Callable

import torch
from torch import Tensor


def gather_texts(text: str, gather: Callable[[Tensor], list[Tensor]]) -> list[str]:
    """Every rank's text, in rank order, whatever its length. `gather` does the same for bytes on the CPU."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [bytes(theirs.tolist()).decode() for theirs in gather(mine)]
