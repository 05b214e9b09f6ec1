"""Values without indices, for coordinates that both sides know; and bare floats. `format.py` describes both.

A format may be given by its name; kernels are those of the device that holds the values.
"""

import numpy as np
import torch
from torch import Tensor

from spardl.errors import ProtocolError
from spardl.host import Flag, download
from spardl.kernels.api import Kernels
from spardl.sparse import Array
from spardl.wire.format import FOREIGN, NOT_FINITE, POISONED, ValueFormat, value_format

_FINE, _POISONED = 1, 2  # one more


def size(count: int, form: str | ValueFormat) -> int:
    """Bytes of a vector of `count` values."""
    values = value_format(form)
    return 1 + _scales_size(count, values) + values.size(count)


def pack(values: Tensor, form: str | ValueFormat, kernels: Kernels, *, poisoned: Flag = False) -> tuple[Tensor, Tensor]:
    """The vector as bytes, and the values that its receivers will decode."""
    counts = np.array([values.numel()])
    form = value_format(form)
    codes, scales = kernels.encode(form, values, counts)
    flag = torch.full((1,), _FINE, dtype=torch.uint8, device=values.device)
    flag += poisoned
    scale = scales.view(torch.uint8) if scales.numel() else flag[:0]
    frame = torch.cat((flag, scale, kernels.pack_codes(codes.contiguous(), form.bits)))
    return frame, kernels.decode(form, codes, scales, counts)


def unpack(frame: Array, count: int, form: str | ValueFormat, kernels: Kernels, peer: int) -> Tensor | None:
    """What `pack` sent, or None if it was poisoned; `ProtocolError` if it is not `count` finite values."""
    values = _decode(frame, count, value_format(form), kernels, peer)
    first = torch.as_tensor(frame)[0]
    flag, fine = download(torch.stack((first, torch.isfinite(values).all().to(torch.uint8)))).tolist()
    if flag not in (_FINE, _POISONED):
        raise _other(count, peer)
    if flag == _POISONED:
        return None
    if not fine:
        raise ProtocolError(f"rank {peer} sent a value that is not finite; nothing was applied.", peer=peer)
    return values


def opened(frame: Array, count: int, form: str | ValueFormat, kernels: Kernels, peer: int) -> tuple[Tensor, Tensor]:
    """What `pack` sent, and a verdict (`format.py`), 0 if all is well, both on the device: nobody waits.

    Otherwise the values are zeros. `ProtocolError` if it is not as long as `count` values are.
    """
    values = _decode(frame, count, value_format(form), kernels, peer)
    flag = torch.as_tensor(frame)[0]
    verdict = torch.zeros((), dtype=torch.int64, device=values.device)
    verdict = verdict.masked_fill(~torch.isfinite(values).all(), NOT_FINITE).masked_fill(flag == _POISONED, POISONED)
    verdict = verdict.masked_fill((flag != _FINE) & (flag != _POISONED), FOREIGN)
    return verdict, values.masked_fill(verdict != 0, 0)


def _decode(frame: Array, count: int, form: ValueFormat, kernels: Kernels, peer: int) -> Tensor:
    frame = torch.as_tensor(frame)
    if frame.numel() != size(count, form):
        raise _other(count, peer)
    codes_at = 1 + _scales_size(count, form)
    scales = frame[1:codes_at].clone().view(torch.float32)
    codes = kernels.unpack_codes(frame[codes_at:], count, form.bits, form.dtype)
    return kernels.decode(form, codes, scales, np.array([count]))


def split(frame: Array, counts: list[int], form: str | ValueFormat, peer: int) -> list[Tensor]:
    """The vectors of `counts[i]` values each that arrived as one message."""
    frame = torch.as_tensor(frame)
    sizes = [size(count, form) for count in counts]
    if frame.numel() != sum(sizes):
        raise _other(sum(counts), peer)
    return list(frame.split(sizes))


def bare(values: Tensor) -> Tensor:
    """Values as they are, as bytes in memory of their own."""
    return values.clone().view(torch.uint8)


def floats(frame: Array, count: int, peer: int) -> Tensor:
    """`count` values that were sent as they are, finite or not."""
    if len(frame) != 4 * count:
        raise _other(count, peer)
    return torch.as_tensor(frame).view(torch.float32)


def _scales_size(count: int, form: ValueFormat) -> int:
    return 4 * form.scales_of(np.array([count]))


def _other(count: int, peer: int) -> ProtocolError:
    return ProtocolError(f"rank {peer} sent something other than {count} values; nothing was applied.", peer=peer)
