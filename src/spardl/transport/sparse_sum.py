"""An all-reduce of sparse COO tensors, on any transport that can gather bytes.

Everybody's entries go to everybody, who adds them up in rank order: the same bits on all ranks and every transport.
Cost: two gathers, of the indices and of the values; each rank sends its own entries to all others.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spardl.errors import ProtocolError
from spardl.metrics import Traffic


@torch.no_grad()
def sum_sparse(
    tensor: Tensor, gather: Callable[[Tensor], list[Tensor]], refuse: Callable[[int], ProtocolError]
) -> list[int]:
    """Sum `tensor` over all ranks in place. How many bytes each rank's entries took, in rank order.

    `gather` gives every rank's bytes, in rank order. `refuse` makes the error for a rank whose entries are not those of
    a tensor like ours.
    """
    mine = tensor.cpu().coalesce()
    indices = gather(as_bytes(mine.indices()))
    values = gather(as_bytes(mine.values()))
    terms = []
    for rank, (where, what) in enumerate(zip(indices, values, strict=True)):
        try:
            terms.append(_entries(where.cpu(), what.cpu(), mine))
        except RuntimeError as error:
            raise refuse(rank) from error
    tensor.copy_(sum_in_order(terms).coalesce())
    return [where.numel() + what.numel() for where, what in zip(indices, values, strict=True)]


def count_sparse(traffic: Traffic, sizes: list[int], rank: int, seconds: float) -> None:
    """Enter such a sum into the account of `rank`: its entries to all others, and theirs to it."""
    others = len(sizes) - 1
    received = sum(sizes) - sizes[rank]
    traffic.count(rounds=2, messages=2 * others, sent=sizes[rank] * others, received=received, seconds=seconds)


def sum_in_order(terms: list[Tensor]) -> Tensor:
    """The sum of tensors, one after another: the same bits wherever it is computed. Sparse ones are coalesced first."""
    total, *others = (term if term.layout is torch.strided else term.coalesce() for term in terms)
    total = total.clone()
    for term in others:
        total += term
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """What a tensor holds, as bytes in one stretch."""
    return tensor.reshape(-1).view(torch.uint8)


def _entries(indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """The tensor that a rank has sent. `RuntimeError` unless it fits ours: it comes from the network."""
    where = indices.view(torch.int64).view(like.sparse_dim(), -1)
    what = values.view(like.dtype).view(-1, *like.values().shape[1:])
    return torch.sparse_coo_tensor(where, what, like.shape, is_coalesced=True, check_invariants=True)
