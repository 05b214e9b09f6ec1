"""The sum of all workers' values at coordinates that all of them know: no index travels, nothing is dropped."""

import torch
from torch import Tensor

from spardl.collectives.memory import Memory
from spardl.collectives.program import Program, Round, Team
from spardl.config import Values
from spardl.sparse import SparseBlocks
from spardl.wire import vector


def sum_at(team: Team, memory: Memory, support: SparseBlocks) -> Program[SparseBlocks]:
    """Take the values at `support` out of every member's memory and return their sum, with the same bits on all.

    Member b sums block b, in member order: one round of m - 1 messages there, ceil(log2 m) rounds back, in all
    2 (m - 1)/m values per coordinate and member. Whoever rounds keeps the error.
    """
    sizes = support.counts.tolist()
    form, position = _form(memory), team.position
    taken = memory.acc.take_at(support)
    _poison_unless_finite(memory, taken)
    mine = taken.split(sizes)
    rounded = []
    frames = []
    for values in mine:
        frame, seen = vector.pack(values, form, poisoned=memory.acc.poisoned)
        frames.append(frame)
        rounded.append(seen)
    _keep_error(memory, support, torch.cat(mine) - torch.cat(rounded))

    own = sizes[position]
    distances = range(1, team.size)
    sends = [(team.member(d), frames[(position + d) % team.size]) for d in distances]
    arrived = yield Round(sends, [(team.member(-d), vector.size(own, form)) for d in distances], "values to owners")
    versions = {position: rounded[position]}
    for distance, frame in zip(distances, arrived, strict=True):
        values = vector.unpack(frame, own, form, team.member(-distance))
        versions[(position - distance) % team.size] = _or_poison(memory, values, own)
    total = torch.zeros_like(rounded[position])
    for member in range(team.size):
        total += versions[member]

    _poison_unless_finite(memory, total)
    frame, seen = vector.pack(total, form, poisoned=memory.acc.poisoned)
    first = sum(sizes[:position])
    block = SparseBlocks(
        support.ids[position : position + 1],
        support.counts[position : position + 1],
        support.indices[first : first + own],
        total,
    )
    _keep_error(memory, block, total - seen)
    sums = yield from _gather(team, memory, frame, seen, sizes)
    return SparseBlocks(support.ids, support.counts, support.indices, torch.cat(sums))


def _gather(team: Team, memory: Memory, frame: Tensor, seen: Tensor, sizes: list[int]) -> Program[list[Tensor]]:
    """Bruck's doubling over frames of known sizes. Every member decodes the same bytes."""
    form = _form(memory)
    frames = {team.position: frame}
    sums = {team.position: seen}
    while len(frames) < team.size:
        gap = len(frames)
        count = min(gap, team.size - gap)
        here = [(team.position + i) % team.size for i in range(count)]
        there = [(team.position + gap + i) % team.size for i in range(count)]
        counts = [sizes[block] for block in there]
        capacity = sum(vector.size(count, form) for count in counts)
        (received,) = yield team.exchange(
            torch.cat([frames[block] for block in here]), to=-gap, source=gap, capacity=capacity, name="sums"
        )
        for block, piece in zip(there, vector.split(received, counts, form, team.member(gap)), strict=True):
            frames[block] = piece
            sums[block] = _or_poison(memory, vector.unpack(piece, sizes[block], form, team.member(gap)), sizes[block])
    return [sums[block] for block in range(team.size)]


def _form(memory: Memory) -> Values:
    assert memory.codec.values != "none", "only indices travel without values"
    return memory.codec.values


def _keep_error(memory: Memory, entries: SparseBlocks, error: Tensor) -> None:
    if memory.codec.values != "fp32":
        memory.give_back(SparseBlocks(entries.ids, entries.counts, entries.indices, error))


def _poison_unless_finite(memory: Memory, values: Tensor) -> None:
    if not torch.isfinite(values).all():
        memory.acc.poisoned = True


def _or_poison(memory: Memory, values: Tensor | None, count: int) -> Tensor:
    if values is None:
        memory.acc.poisoned = True
        return torch.zeros(count, device=memory.acc.device)
    return values
