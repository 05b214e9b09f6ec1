"""Between host and device: the two ways in which numbers pass, and what each costs.

A device with a queue of its own computes while the host goes on; whoever reads a result waits for all that was queued
before it. So everything that the host has to know passes through `download`, whose calls can be counted, and everything
that the device has to know through `upload`, for which nobody waits. On a CPU both are free.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Flag = bool | Tensor  # a bool, or one on the device that nobody has waited for
Count = int | Tensor  # likewise

# Whole numbers on a device, and who is told them when the host has read them.
Question = tuple[Tensor, Callable[[NDArray[np.int64]], None]]


def upload(values: NDArray[Any] | Sequence[Any], device: torch.device) -> Tensor:
    """These numbers on the device, in memory of their own where that is not the host. The host does not wait."""
    found = torch.from_numpy(np.array(values))
    if device.type == "cpu":
        return found
    if device.type == "cuda":
        found = found.pin_memory()  # only from there does a copy go on by itself
    return found.to(device, non_blocking=True)


def spread(per_block: NDArray[np.int64], counts: NDArray[np.int64], device: torch.device) -> Tensor:
    """`per_block[b]`, repeated for each of the `counts[b]` entries of block b. A number per block is copied up."""
    if device.type == "cpu":
        return torch.from_numpy(np.repeat(per_block, counts))
    both = upload(np.stack((per_block, counts)), device)
    return torch.repeat_interleave(both[0], both[1], output_size=int(counts.sum()))


def bring(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """These tensors on a device: themselves if they are there, otherwise copies. The host waits once for all of them,
    if it is where they are brought."""
    away = [each for each in tensors if each.device.type != device.type]
    if not away:
        return list(tensors)
    if device.type != "cpu":
        return [each.to(device, non_blocking=True) for each in tensors]
    pinned = any(each.device.type == "cuda" for each in away)  # only there does a copy go on by itself
    found = []
    for each in tensors:
        here = each.device.type == device.type
        found.append(each if here else torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned))
        if not here:
            found[-1].copy_(each, non_blocking=True)
    synchronize(away[0].device)
    return found


def synchronize(device: torch.device) -> None:
    """Return when the current stream of a device has done all that was queued on it."""
    streams = streams_of(device)
    if streams is not None:
        streams.current_stream(device).synchronize()
    elif device.type != "cpu" and hasattr(torch.get_device_module(device), "synchronize"):
        torch.get_device_module(device).synchronize()


def streams_of(device: torch.device) -> Any:
    """Torch's module with the streams of this kind of device, such as torch.cuda; None where streams cannot be chosen.

    Not torch.accelerator: its streams can be entered from torch 2.7 on, and within each other much later.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "stream") and module.is_available() else None


def marked(mask: Tensor, count: int, fill: int = 0) -> Tensor:
    """The first `count` places where a mask holds, and `fill` for those that it does not have. Nobody waits."""
    if not mask.numel() or not count:  # of which some versions of torch make an error on CUDA
        return torch.full((count,), fill, device=mask.device)
    try:
        return torch.nonzero_static(mask, size=count, fill_value=fill).flatten()
    except NotImplementedError:  # torch 2.6 may not have it for CUDA
        ones = mask.cumsum(0)
        found = torch.searchsorted(ones, torch.arange(1, count + 1, device=mask.device))
        return found.masked_fill(found == mask.numel(), fill)


def quotient(values: Tensor, number: float) -> Tensor:
    """`values / number`, with the bits of a CPU on every device: by a number of the host CUDA does not divide, it
    multiplies by its reciprocal, which may be rounded otherwise."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


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


def ask(questions: Sequence[Question]) -> None:
    """Read what all of these are about and tell those who asked; the host waits once, and for nothing not at all."""
    numbers = [tensor.flatten().long() for tensor, _ in questions]
    if not numbers:
        return
    together = torch.cat(numbers)
    found = download(together) if together.numel() else np.zeros(0, np.int64)
    ends = np.cumsum([each.numel() for each in numbers])
    for part, (_, answer) in zip(np.split(found, ends[:-1]), questions, strict=True):
        answer(part)
