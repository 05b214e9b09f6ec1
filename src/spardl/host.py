"""Between host and device: the two ways in which numbers pass, and what each costs.

A device with a queue of its own computes while the host goes on; whoever reads a result waits for all that was queued
before it. So everything that the host has to know passes through `download`, whose calls can be counted, and everything
that the device has to know through `upload`, for which nobody waits. On a CPU both are free.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Flag = bool | Tensor  # a bool, or one on the device that nobody has waited for

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
    if not has_streams(device):
        return  # nothing goes on by itself there
    mark = torch.Event(device)
    mark.record()
    mark.synchronize()


def has_streams(device: torch.device) -> bool:
    """Whether torch has an accelerator of this kind, whose streams can be chosen."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


@contextlib.contextmanager
def queueing_on(stream: torch.Stream, before: torch.Stream) -> Iterator[None]:
    """What is queued inside goes to this stream, and afterwards to the one before it again."""
    if hasattr(stream, "__enter__"):
        with stream:
            yield
        return
    torch.accelerator.set_stream(stream)  # torch 2.6, whose streams cannot be entered
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


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
    if not questions:
        return
    numbers = [tensor.flatten().long() for tensor, _ in questions]
    found = download(torch.cat(numbers))
    ends = np.cumsum([each.numel() for each in numbers])
    for part, (_, answer) in zip(np.split(found, ends[:-1]), questions, strict=True):
        answer(part)
