"""The kernels of any device, in plain torch. `spardl.kernels.api` says what each of them promises.

They keep data on its device, need no compiler, and give the same bits as the compiled ones of a CPU. There they are
slower, and heavier on memory. They keep no shortlist. Run here on CPU only.
"""

import numpy as np
import torch
from torch import Tensor

from spardl.kernels import torch_frames
from spardl.kernels.api import Bools, CodedEntries, Ints, KernelsOf
from spardl.wire.format import FrameFormat


class TorchKernels(KernelsOf[Tensor, None]):
    """One object serves all devices: tensors say where they are."""

    def array(self, values: Tensor) -> Tensor:
        return values

    def tensor(self, values: Tensor, kind: torch.dtype) -> Tensor:
        return values.view(kind)

    def new_shortlist(self, blocks: int) -> None:
        return None

    def all_finite(self, values: Tensor) -> bool:
        return bool(torch.isfinite(values).all())

    # --- natural order and block order ------------------------------------------------------------------------------

    def accumulate(
        self,
        acc: Tensor,
        starts: Ints,
        chunk: int,
        offset: int,
        gradient: Tensor,
        scale: float,
        wanted: Bools,
        shortlist: None = None,
    ) -> bool:
        here = _chosen(wanted, chunk, offset, gradient.numel(), acc.device)
        places = _places(starts, chunk, offset, gradient.numel(), acc.device)[here]
        before = acc[places]
        after = before + gradient[here] * scale
        acc[places] = after
        gradient[here] = before
        return self.all_finite(after)

    def differ(
        self,
        acc: Tensor,
        starts: Ints,
        chunk: int,
        offset: int,
        shared: Tensor,
        own: Tensor,
        wanted: Bools,
        shortlist: None = None,
    ) -> bool:
        here = _chosen(wanted, chunk, offset, own.numel(), acc.device)
        difference = shared[here] - own[here]
        acc[_places(starts, chunk, offset, own.numel(), acc.device)[here]] = difference
        return self.all_finite(difference)

    def accumulate_momentum(
        self,
        acc: Tensor,
        velocity: Tensor,
        updated: Tensor,
        starts: Ints,
        chunk: int,
        offset: int,
        gradient: Tensor,
        weights: Tensor,
        scale: float,
        momentum: float,
        decay: float,
        damping: float,
        nesterov: bool,
        wanted: Bools,
        shortlist: None = None,
    ) -> bool:
        here = _chosen(wanted, chunk, offset, gradient.numel(), acc.device)
        places = _places(starts, chunk, offset, gradient.numel(), acc.device)[here]
        fresh = gradient[here] * scale + decay * weights[here]
        speed = momentum * velocity[places] + damping * fresh
        before = acc[places]
        after = before + (fresh + momentum * speed if nesterov else speed)
        acc[places] = after
        updated[places] = speed
        gradient[here] = before
        return self.all_finite(after)

    def read(self, acc: Tensor, starts: Ints, chunk: int, offset: int, out: Tensor) -> None:
        out.copy_(acc[_places(starts, chunk, offset, out.numel(), acc.device)])

    def write(self, acc: Tensor, starts: Ints, chunk: int, offset: int, source: Tensor) -> None:
        acc[_places(starts, chunk, offset, source.numel(), acc.device)] = source

    def to_natural_order(
        self, starts: Ints, chunk: int, counts: Ints, indices: Tensor, values: Tensor, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        count = len(starts) - 1
        blocks = _spread(np.arange(count), counts, indices.device)
        slots = indices // chunk
        positions = (slots.long() * count + blocks) * chunk + indices % chunk
        positions, order = torch.sort(positions)
        return positions, values[order] * factor

    def put_only(self, out: Tensor, positions: Tensor, values: Tensor) -> None:
        out.zero_()
        out[positions] = values

    # --- weights ----------------------------------------------------------------------------------------------------

    def changes(self, acc: Tensor, positions: Tensor, before: Tensor) -> Tensor:
        now = acc[positions]
        places, owner = positions.unique(return_inverse=True)
        order = torch.arange(positions.numel(), device=acc.device)
        first = torch.full_like(places, positions.numel()).scatter_reduce_(0, owner, order, "amin")
        acc[places] = before[first]
        return acc[positions] - now

    def natural_positions(self, positions: Tensor, starts: Ints, chunk: int) -> Tensor:
        base = torch.from_numpy(starts).to(positions.device)
        block = torch.searchsorted(base, positions, right=True) - 1
        slot = positions - base[block]
        return (slot // chunk * (len(starts) - 1) + block) * chunk + slot % chunk

    def land(self, shared: Tensor, own: Tensor, support: Tensor, step: Tensor, touched: Tensor, sent: Tensor) -> None:
        left = shared[touched] - own[touched] - sent
        shared[support] -= step
        own[support] -= step
        own[touched] = shared[touched] - left

    # --- selection --------------------------------------------------------------------------------------------------

    def take_largest(
        self,
        acc: Tensor,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: None = None,
    ) -> tuple[Ints, Tensor, Tensor]:
        counts = np.zeros(firsts.size, np.int64)
        indices, values = [], []
        for b, (first, stop, budget) in enumerate(zip(firsts.tolist(), stops.tolist(), budgets.tolist(), strict=True)):
            block = acc[first:stop]
            kept = self.keep_largest(block, budget).nonzero().flatten()
            counts[b] = kept.numel()
            taken = block[kept]
            indices.append(kept.int())
            values.append(taken)
            block[kept] = 0
        if not indices:
            return counts, acc.new_empty(0, dtype=torch.int32), acc.new_empty(0)
        return counts, torch.cat(indices), torch.cat(values)

    def take_rounded(
        self,
        acc: Tensor,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: None = None,
    ) -> tuple[Ints, Tensor, Tensor, bool]:
        counts, indices, values = self.take_largest(acc, firsts, stops, budgets)
        codes, errors = self.round_bf16(values)
        self.scatter_add(acc, firsts, counts, indices, errors)
        return counts, indices, codes, self.all_finite(values)

    def take_above(
        self, acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: None = None
    ) -> tuple[Tensor, Tensor]:
        block = acc[first:stop]
        kept = ((block.abs() >= abs(threshold)) & (block != 0)).nonzero().flatten()[: max(0, limit)]
        values = block[kept]
        block[kept] = 0
        return kept.int(), values

    def count_above(self, values: Tensor, threshold: float, shortlist: None = None) -> int:
        return int(((values.abs() >= abs(threshold)) & (values != 0)).sum())

    def count_bins(self, values: Tensor, first: int, shift: int, bins: int) -> Ints:
        places = (values.view(torch.int32).bitwise_and(0x7FFFFFFF) >> shift).long() - first
        counts = torch.bincount(places[places >= 0].clamp(max=bins - 1), minlength=bins)
        return np.asarray(counts.cpu().numpy(), np.int64)

    def keep_largest(self, values: Tensor, budget: int) -> Tensor:
        magnitudes = values.abs()
        if budget >= values.numel():
            return magnitudes > 0
        if budget <= 0:
            return torch.zeros_like(magnitudes, dtype=torch.bool)
        last = torch.topk(magnitudes, budget, sorted=True).values[-1]
        if last == 0:
            return magnitudes > 0
        keep = magnitudes > last
        ties = (magnitudes == last).nonzero().flatten()
        keep[ties[: budget - int(keep.sum())]] = True
        return keep

    def part_largest(
        self, indices: Tensor, values: Tensor, budget: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        keep = self.keep_largest(values, budget)
        return (indices[keep], values[keep]), (indices[~keep], values[~keep])

    # --- sparse arithmetic ------------------------------------------------------------------------------------------

    def scatter_add(
        self,
        acc: Tensor,
        firsts: Ints,
        counts: Ints,
        indices: Tensor,
        values: Tensor,
        ids: Ints | None = None,
        shortlist: None = None,
    ) -> None:
        places = _spread(firsts, counts, acc.device) + indices
        acc[places] = acc[places] + values

    def fade(self, memory: Tensor, firsts: Ints, counts: Ints, indices: Tensor, values: Tensor, share: float) -> None:
        places = _spread(firsts, counts, memory.device) + indices
        entries, values = memory[places], values.abs()
        most = share * entries.abs()
        memory[places] = torch.where(most < values, entries * (most / values), entries)

    def merge(self, left: Tensor, left_values: Tensor, right: Tensor, right_values: Tensor) -> tuple[Tensor, Tensor]:
        indices, inverse = torch.unique(torch.cat((left, right)), sorted=True, return_inverse=True)
        values = torch.zeros(indices.numel(), dtype=left_values.dtype, device=left_values.device)
        values[inverse[: left.numel()]] = left_values
        mine = inverse[left.numel() :]
        values[mine] = values[mine] + right_values
        kept = values != 0
        return indices[kept], values[kept]

    # --- what travels -----------------------------------------------------------------------------------------------

    def round_bf16(self, values: Tensor) -> tuple[Tensor, Tensor]:
        limit = torch.finfo(torch.bfloat16).max
        codes = values.clamp(-limit, limit).to(torch.bfloat16)
        return codes, values - codes.float()

    def widen_bf16(self, codes: Tensor) -> Tensor:
        return codes.float()

    def frame_room(self, form: FrameFormat, lengths: Ints, budgets: Ints) -> int:
        return torch_frames.frame_room(form, lengths, budgets)

    def write_frame(
        self, form: FrameFormat, poisoned: bool, lengths: Ints, budgets: Ints, entries: CodedEntries[Tensor]
    ) -> Tensor:
        return torch_frames.write_frame(form, poisoned, lengths, budgets, entries)

    def read_frame(
        self, frame: Tensor, form: FrameFormat, lengths: Ints, budgets: Ints
    ) -> tuple[int, CodedEntries[Tensor]]:
        return torch_frames.read_frame(frame, form, lengths, budgets)


def _places(starts: Ints, chunk: int, offset: int, length: int, device: torch.device) -> Tensor:
    """Where natural positions [offset, offset + length) lie in block order."""
    count = len(starts) - 1
    positions = torch.arange(offset, offset + length, device=device)
    pieces = positions // chunk
    base = torch.from_numpy(starts[:-1].copy()).to(device)
    return base[pieces % count] + (pieces // count) * chunk + positions % chunk


def _spread(per_block: Ints, counts: Ints, device: torch.device) -> Tensor:
    """`per_block[b]`, repeated for each of the `counts[b]` entries of block b."""
    return torch.from_numpy(np.repeat(per_block, counts)).to(device)


def _chosen(wanted: Bools, chunk: int, offset: int, length: int, device: torch.device) -> Tensor:
    """Which of natural positions [offset, offset + length) lie in wanted blocks, counted from `offset`."""
    blocks = torch.arange(offset, offset + length, device=device) // chunk % len(wanted)
    return torch.from_numpy(wanted).to(device)[blocks].nonzero().flatten()
