"""The kernels of any device, in plain torch. `spardl.kernels.api` says what each of them promises.

They keep data on its device, need no compiler, and give the same bits as the compiled ones of a CPU. There they are
slower, and heavier on memory. They keep no shortlist. Flags stay on the device (`spardl.host`). Kernels that *fill*, as
they do on every device but a CPU, know all counts beforehand, so that the host waits in very few calls; docstrings
below say in which. Run by us on CPU tensors, and on the device of the tests (docs/gpu.md).
"""

import numpy as np
import torch
from torch import Tensor

from spardl.host import Count, Flag, download, marked, spread, upload
from spardl.kernels import torch_frames
from spardl.kernels.api import Bools, CodedEntries, Ints, KernelsOf
from spardl.wire.format import FrameFormat, ValueFormat


class TorchKernels(KernelsOf[Tensor, None]):
    """One object serves all devices: tensors say where they are. `fills` as in `spardl.kernels.api`."""

    passes = torch_frames.Passes()  # over the entries of frames

    def __init__(self, *, fills: bool = False) -> None:
        self.fills = fills

    def array(self, values: Tensor) -> Tensor:
        return values

    def tensor(self, values: Tensor, kind: torch.dtype) -> Tensor:
        return values.view(kind)

    def new_shortlist(self, blocks: int) -> None:
        return None

    def all_finite(self, values: Tensor) -> Flag:
        return torch.isfinite(values).all()

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
    ) -> Flag:
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
    ) -> Flag:
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
    ) -> Flag:
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
        blocks = spread(np.arange(count), counts, indices.device)
        slots = indices // chunk
        positions = (slots.long() * count + blocks) * chunk + indices % chunk
        positions, order = torch.sort(positions)
        return positions, values[order] * factor

    def put_only(self, out: Tensor, positions: Tensor, values: Tensor) -> None:
        out.zero_()
        out[positions] = values

    # --- weights ----------------------------------------------------------------------------------------------------

    def changes(
        self, acc: Tensor, starts: Ints, chunk: int, positions: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        natural, order = torch.sort(_natural(positions, starts, chunk), stable=True)  # the first change comes first
        fresh = torch.ones_like(natural, dtype=torch.bool)
        fresh[1:] = natural[1:] != natural[:-1]
        first = torch.where(fresh, torch.arange(natural.numel(), device=acc.device), 0).cummax(0).values
        return natural, before[order[first]] - acc[positions[order]]

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
        """Waits once, for the counts of all blocks; not at all if these kernels fill."""
        lengths = stops - firsts
        if not firsts.size:
            return np.zeros(0, np.int64), acc.new_empty(0, dtype=torch.int32), acc.new_empty(0)
        if self.fills:
            counts = np.clip(budgets, 0, lengths)
            return counts, *self._take_full(acc, firsts, stops, counts)
        masks = self._masks(acc, firsts, stops, budgets)
        counts = download(torch.stack([mask.sum() for mask in masks]))
        return counts, *self._take(acc, firsts, lengths, masks, counts)

    def _masks(self, acc: Tensor, firsts: Ints, stops: Ints, budgets: Ints) -> list[Tensor]:
        spans = zip(firsts.tolist(), stops.tolist(), budgets.tolist(), strict=True)
        return [self.keep_largest(acc[first:stop], budget) for first, stop, budget in spans]

    def _take_full(self, acc: Tensor, firsts: Ints, stops: Ints, counts: Ints) -> tuple[Tensor, Tensor]:
        """Take the `counts[b]` largest entries of each block, zeros among them; indices and values."""
        return self._take(acc, firsts, stops - firsts, self._masks(acc, firsts, stops, counts), counts)

    def _take(
        self, acc: Tensor, firsts: Ints, lengths: Ints, masks: list[Tensor], counts: Ints
    ) -> tuple[Tensor, Tensor]:
        """Take what masks of these blocks mark, `counts[b]` entries each; indices and values."""
        found = marked(torch.cat(masks), int(counts.sum()))  # in these blocks, one after the other
        indices = found - spread(lengths.cumsum() - lengths, counts, acc.device)
        places = indices + spread(firsts, counts, acc.device)
        values = acc[places]
        acc[places] = 0
        return indices.int(), values

    def take_rounded(
        self,
        acc: Tensor,
        firsts: Ints,
        stops: Ints,
        budgets: Ints,
        ids: Ints | None = None,
        shortlist: None = None,
    ) -> tuple[Ints, Tensor, Tensor, Flag]:
        """Waits as `take_largest` does."""
        counts, indices, values = self.take_largest(acc, firsts, stops, budgets)
        codes, errors = self.round_bf16(values)
        self.scatter_add(acc, firsts, counts, indices, errors)
        return counts, indices, codes, self.all_finite(values)

    def take_above(
        self, acc: Tensor, first: int, stop: int, threshold: float, limit: int, shortlist: None = None
    ) -> tuple[Tensor, Tensor]:
        """Waits once, for their number; not at all if these kernels fill."""
        block = acc[first:stop]
        above = (block.abs() >= abs(threshold)) & (block != 0)
        kept = marked(above, max(0, limit)) if self.fills else above.nonzero().flatten()[: max(0, limit)]
        values = block[kept]
        block[kept] = 0
        return kept.int(), values

    def count_above(self, values: Tensor, threshold: float, shortlist: None = None) -> Count:
        return ((values.abs() >= abs(threshold)) & (values != 0)).sum()

    def count_bins(self, values: Tensor, first: int, shift: int, bins: int) -> Tensor:
        places = (values.view(torch.int32).bitwise_and(0x7FFFFFFF) >> shift).long() - first
        counts = torch.zeros(bins + 1, dtype=torch.int64, device=values.device)  # those below are counted first
        counts.index_add_(0, places.clamp(-1, bins - 1) + 1, torch.ones_like(places))
        return counts[1:]

    def keep_largest(self, values: Tensor, budget: int) -> Tensor:
        magnitudes = values.view(torch.int32) & 0x7FFFFFFF  # what is not finite is larger than all that is
        if budget >= values.numel():
            return torch.ones_like(magnitudes, dtype=torch.bool) if self.fills else magnitudes > 0
        if budget <= 0:
            return torch.zeros_like(magnitudes, dtype=torch.bool)
        last = torch.topk(magnitudes, budget, sorted=True).values[-1]
        keep = magnitudes > last
        ties = magnitudes == last if self.fills else (magnitudes == last) & (last > 0)
        return keep | (ties & (ties.cumsum(0) <= budget - keep.sum()))

    def part_largest(
        self, indices: Tensor, values: Tensor, budget: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Waits once, for the number of the first part; not at all if these kernels fill."""
        keep = self.keep_largest(values, budget)
        count = max(0, budget) if self.fills else int(download(keep.sum()))
        first, second = marked(keep, count), marked(~keep, values.numel() - count)
        return (indices[first], values[first]), (indices[second], values[second])

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
        places = spread(firsts, counts, acc.device) + indices
        acc[places] = acc[places] + values

    def fade(self, memory: Tensor, firsts: Ints, counts: Ints, indices: Tensor, values: Tensor, share: float) -> None:
        places = spread(firsts, counts, memory.device) + indices
        entries, values = memory[places], values.abs()
        most = share * entries.abs()
        memory[places] = torch.where(most < values, entries * (most / values), entries)

    def merge(
        self, left: Tensor, left_values: Tensor, right: Tensor, right_values: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Waits once, for their number; not at all if these kernels fill."""
        indices, order = torch.sort(torch.cat((left, right)), stable=True)  # the left one of a pair comes first
        values = torch.cat((left_values, right_values))[order]
        again = indices[1:] == indices[:-1]
        values[:-1] += values[1:].where(again, -0.0)  # which changes no bit of any number
        values[1:].masked_fill_(again, 0)
        if not indices.numel():
            return indices, values
        if self.fills:
            return _moved(indices, values, torch.nn.functional.pad(again, (1, 0)), length)
        kept = (values != 0).nonzero().flatten()
        return indices[kept], values[kept]

    # --- what travels -----------------------------------------------------------------------------------------------

    def round_bf16(self, values: Tensor) -> tuple[Tensor, Tensor]:
        limit = torch.finfo(torch.bfloat16).max
        codes = values.clamp(-limit, limit).to(torch.bfloat16)
        return codes, values - codes.float()

    def widen_bf16(self, codes: Tensor) -> Tensor:
        return codes.float()

    def encode(self, form: ValueFormat, values: Tensor, counts: Ints) -> tuple[Tensor, Tensor]:
        return form.encode(values, counts)

    def decode(self, form: ValueFormat, codes: Tensor, scales: Tensor, counts: Ints) -> Tensor:
        return form.decode(codes, scales, counts)

    def pack_codes(self, codes: Tensor, bits: int) -> Tensor:
        return self.passes.pack_codes(codes, bits)

    def unpack_codes(self, data: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
        return self.passes.unpack_codes(data, count, bits, dtype)

    def frame_room(self, form: FrameFormat, lengths: Ints, budgets: Ints) -> int:
        return torch_frames.frame_room(form, lengths, budgets)

    def write_frame(
        self, form: FrameFormat, poisoned: Flag, lengths: Ints, budgets: Ints, entries: CodedEntries[Tensor]
    ) -> Tensor:
        """Waits once, for the length of Rice codes; not at all if these kernels fill, whose frames are as long as may
        be."""
        frame, length = torch_frames.write_frame(form, poisoned, lengths, budgets, entries, self.passes)
        if self.fills:
            return frame
        return frame[: int(download(length)) if isinstance(length, Tensor) else length]

    def read_frame(
        self, frame: Tensor, form: FrameFormat, lengths: Ints, budgets: Ints, *, full: bool = False
    ) -> tuple[int | Tensor, CodedEntries[Tensor]]:
        """Waits for the head, and for the verdict on what follows it; not at all if these kernels fill, and `full`."""
        if full and self.fills:
            return torch_frames.open_frame(frame, form, lengths, np.minimum(budgets, lengths), budgets, self.passes)
        return torch_frames.read_frame(frame, form, lengths, budgets, self.passes)


def _places(starts: Ints, chunk: int, offset: int, length: int, device: torch.device) -> Tensor:
    """Where natural positions [offset, offset + length) lie in block order."""
    count = len(starts) - 1
    positions = torch.arange(offset, offset + length, device=device)
    pieces = positions // chunk
    base = upload(starts[:-1], device)
    return base[pieces % count] + (pieces // count) * chunk + positions % chunk


def _natural(positions: Tensor, starts: Ints, chunk: int) -> Tensor:
    """Where places in block order lie in natural order."""
    base = upload(starts, positions.device)
    block = torch.searchsorted(base, positions, right=True) - 1
    slot = positions - base[block]
    return (slot // chunk * (len(starts) - 1) + block) * chunk + slot % chunk


def _moved(indices: Tensor, values: Tensor, repeated: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Ascending entries of a block, where those that repeat an index have moved to the first ones that no entry has.

    They are zeros. There are as many entries as before, or as the block is long; so nobody has to count them.
    """
    slots = indices.numel()
    reach = min(length, 2 * slots)  # where as many are free as may be needed
    held = torch.zeros(reach + 1, dtype=torch.bool, device=indices.device)
    held[indices.clamp(max=reach).long()] = True
    free = marked(~held[:reach], slots, length)
    moved = torch.where(repeated, free[(repeated.cumsum(0) - 1).clamp(min=0)], indices)
    ascending, order = torch.sort(moved)
    kept = min(slots, length)  # what found no place is behind the block
    return ascending[:kept].int(), values[order[:kept]]


def _chosen(wanted: Bools, chunk: int, offset: int, length: int, device: torch.device) -> Tensor:
    """Which of natural positions [offset, offset + length) lie in wanted blocks, counted from `offset`."""
    stop = offset + length
    chunks = np.arange(offset // chunk, -(-stop // chunk) if length else offset // chunk)
    chunks = chunks[wanted[chunks % len(wanted)]]
    if chunks.size <= 2:  # each may be far longer than what is asked about
        spans = [(max(offset, at), min(stop, at + chunk)) for at in (chunks * chunk).tolist()]
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat([nothing, *(torch.arange(i, j, device=device) for i, j in spans)]) - offset
    found = (upload(chunks, device)[:, None] * chunk + torch.arange(chunk, device=device)).flatten()
    before, behind = max(0, offset - int(chunks[0]) * chunk), max(0, (int(chunks[-1]) + 1) * chunk - stop)
    return found[before : found.numel() - behind] - offset
