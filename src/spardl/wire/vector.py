"""Values without indices, for coordinates that both sides know: a flag, a scale for int8, the codes; or bare floats."""

import numpy as np
import torch
from torch import Tensor

from spardl.config import Values
from spardl.errors import ProtocolError
from spardl.sparse import Array
from spardl.wire import values as value_codes

_FINE, _POISONED = 1, 2


def size(count: int, form: Values) -> int:
    """Bytes of a frame with `count` values."""
    return 1 + (4 if form == "int8" else 0) + count * value_codes.CODE_TYPES[form].itemsize


def pack(values: Tensor, form: Values, *, poisoned: bool = False) -> tuple[Tensor, Tensor]:
    """The frame, and the values that its receivers will decode."""
    counts = np.array([values.numel()])
    codes, scales = value_codes.encode(values, counts, form)
    flag = torch.tensor([_POISONED if poisoned else _FINE], dtype=torch.uint8, device=values.device)
    scale = scales.view(torch.uint8) if scales.numel() else flag[:0]
    frame = torch.cat((flag, scale, codes.contiguous().view(torch.uint8) if codes.numel() else flag[:0]))
    return frame, value_codes.decode(codes, scales, counts)


def unpack(frame: Array, count: int, form: Values, peer: int) -> Tensor | None:
    """What `pack` sent, or None if it was poisoned; `ProtocolError` if it is not `count` finite values."""
    frame = torch.as_tensor(frame)
    if frame.numel() != size(count, form) or int(frame[0]) not in (_FINE, _POISONED):
        raise _other(count, peer)
    if int(frame[0]) == _POISONED:
        return None
    codes_at = size(0, form)
    scales = frame[1:codes_at].clone().view(torch.float32)
    codes = frame[codes_at:].clone().view(value_codes.CODE_TYPES[form])
    values = value_codes.decode(codes, scales, np.array([count]))
    if not torch.isfinite(values).all():
        raise ProtocolError(f"rank {peer} sent a value that is not finite; nothing was applied.", peer=peer)
    return values


def split(frame: Array, counts: list[int], form: Values, peer: int) -> list[Tensor]:
    """The frames of so many values each that arrived as one message."""
    frame = torch.as_tensor(frame)
    sizes = [size(count, form) for count in counts]
    if frame.numel() != sum(sizes):
        raise _other(sum(counts), peer)
    return list(frame.split(sizes))


def floats(frame: Array, count: int, peer: int) -> Tensor:
    """`count` values that were sent as they are, finite or not."""
    if len(frame) != 4 * count:
        raise _other(count, peer)
    return torch.as_tensor(frame).view(torch.float32)


def _other(count: int, peer: int) -> ProtocolError:
    return ProtocolError(f"rank {peer} sent something other than {count} values; nothing was applied.", peer=peer)
