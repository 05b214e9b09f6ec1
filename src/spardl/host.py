"""Between host and device: the two ways in which numbers pass, and what each costs.

A device with a queue of its own computes while the host goes on; whoever reads a result waits for all that was queued
before it. So everything that the host has to know passes through `download`, whose calls can be counted, and everything
that the device has to know through `upload`, for which nobody waits. On a CPU both are free.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Flag = bool | Tensor  # a bool, or one on the device that nobody has waited for


def upload(values: NDArray[Any] | Sequence[Any], device: torch.device) -> Tensor:
    """These numbers on the device, in memory of their own where that is not the host. The host does not wait."""
    found = torch.from_numpy(np.array(values))
    if device.type == "cpu":
        return found
    if device.type == "cuda":
        found = found.pin_memory()  # only from there does a copy go on by itself
    return found.to(device, non_blocking=True)


def download(values: Tensor) -> NDArray[Any]:
    """These numbers on the host, which waits until the device has computed them."""
    found: NDArray[Any] = values.cpu().numpy()
    return found


def holds(flag: Flag) -> bool:
    """Whether it is so; waits if it is on the device."""
    return bool(download(flag)) if isinstance(flag, Tensor) else bool(flag)


def all_hold(flags: Iterable[Flag]) -> bool:
    """Whether all are so; waits once for those on the device."""
    given = list(flags)
    if not all(flag for flag in given if not isinstance(flag, Tensor)):
        return False
    away = [flag for flag in given if isinstance(flag, Tensor)]
    return holds(torch.stack(away).all()) if away else True
