"""Index coding: gaps between ascending indices, Rice-coded.

A gap g (zeros skipped since the last entry) is split at bit l: its low l bits are stored as they are, g >> l in unary.
For a random subset of density p this takes about log2(1/p) + 1.46 bits per entry, 0.03 above its entropy, and it can
never take more than Elias-Fano coding would, because the quotients of one block cannot sum to more than length >> l:
so the receiver knows the largest possible size from counts and lengths alone. Any bit string decodes to ascending
indices; only the last one can leave the block.
"""

import torch

from spardl import kernels
from spardl.sparse import Ints


def low_bits(counts: Ints, lengths: Ints) -> Ints:
    """The split l of each block: the one with the smallest worst case. Both sides compute it, so it is not sent."""
    return _plan(counts, lengths)[0]


def worst_bits(counts: Ints, lengths: Ints) -> Ints:
    """The most bits that the indices of each block can take. Grows with the count."""
    return _plan(counts, lengths)[1]


def _plan(counts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    # Counts are host arrays whatever device the entries are on.
    plan: tuple[Ints, Ints] = kernels.for_device(torch.device("cpu")).plan_gaps(counts, lengths)
    return plan
