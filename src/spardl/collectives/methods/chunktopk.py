"""Chunk-wise top-k: every worker's largest entries of each chunk, gathered by all and summed.

As in SparseLoCo (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025) and DeMo (Peng et al.,
"Decoupled Momentum Optimization", 2024). A chunk is so many consecutive elements; the releases cut matrices into tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from spardl.choices import is_count, setting
from spardl.collectives.bruck import gather_blocks
from spardl.collectives.method import About, NoOptions, Seat, Stateless
from spardl.collectives.price import Price
from spardl.collectives.program import Program
from spardl.errors import ConfigError
from spardl.memory.layout import BlockLayout, entries
from spardl.sparse import SparseBlocks

if TYPE_CHECKING:
    from spardl.memory.memory import Memory


def _check_chunk(name: str, given: Any) -> None:
    if not is_count(given, least=1):
        raise ConfigError(f"{name}={given!r} is no number of elements; give 1 or more.")


@dataclass(frozen=True)
class ChunkOptions(NoOptions):
    """What can be chosen about chunk-wise top-k."""

    chunk: int = setting(4096, "consecutive elements that a selection is made from", check=_check_chunk, metavar="N")
    mean: str = setting(
        "workers",
        "of an entry that some workers send: over all workers, as in the paper, or over its senders, as released, which"
        " does not conserve",
        choices=("workers", "senders"),
    )


class ChunkTopk(Stateless):
    """ceil(log2 P) rounds; each worker sends k (P - 1) entries, and one per chunk at least."""

    about: ClassVar[About] = About(
        paper="Sarfi et al., 2025",
        rounds=Price("ceil(log2(P))"),
        entries=Price("k*(P-1)", "(k+ceil(n/4096))*(P-1)"),
        note="chunks of 4096 elements; one entry at least of each is sent",
    )
    Options: ClassVar[type[NoOptions]] = ChunkOptions

    def __init__(self, seat: Seat) -> None:
        assert isinstance(seat.options, ChunkOptions)
        self.team = seat.team
        self.layout = BlockLayout.contiguous(seat.length, 1)
        self.by_senders = seat.options.mean == "senders"
        self.whole = np.array([0, seat.length])
        self.edges = np.append(np.arange(0, seat.length, seat.options.chunk), seat.length)

    def synchronize(self, memory: Memory, density: float) -> Program[SparseBlocks]:
        budgets = np.array([entries(density, length) for length in np.diff(self.edges).tolist()])
        memory.repartition(self.edges)
        taken = memory.take_largest(np.arange(len(budgets)), budgets)
        memory.repartition(self.whole)
        mine = memory.frames.code(memory.addresses.in_present_blocks(taken, self.edges))
        each = np.full(self.team.size, budgets.sum())
        pieces = yield from gather_blocks(self.team, memory.frames, mine, np.zeros_like(each), each, full=True)
        versions = [piece.decode() for piece in pieces]
        total = memory.algebra.sum(versions)
        return self._over_senders(memory, versions, total) if self.by_senders else total

    def _over_senders(self, memory: Memory, versions: list[SparseBlocks], total: SparseBlocks) -> SparseBlocks:
        """As many times more as an average over all workers would be too small."""
        import torch

        ones = [SparseBlocks(v.ids, v.counts, v.places, torch.ones_like(v.values)) for v in versions]
        senders = memory.algebra.sum(ones)
        if len(senders) > len(total):  # some entries have cancelled
            senders, _ = memory.algebra.part_by(senders, total)
        amounts = total.values * (self.team.size / senders.values.clamp(min=1))
        return SparseBlocks(total.ids, total.counts, total.places, amounts)
