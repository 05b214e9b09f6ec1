"""Gradient plus residual: one flat float32 buffer per group, and the only owner of residual memory.

The accumulator *is* the residual. Gradients are added, a selection takes entries out, what arrives is added in place;
what nobody took stays, and is the residual of the next step. So nothing can be lost by forgetting to store it.

A step is all or nothing. `add` swaps: the gradient's own memory receives the old residual, which `rollback` copies
back when the step fails anywhere (a non-finite gradient on any rank, a dead peer), and `commit` forgets. This costs
no memory; velocities, where there are any, are kept twice.

Adding may wait (`add_later`): a block is added up when it is first touched, or when `add_up` says that there is time,
because messages are under way.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spardl import kernels
from spardl.blocks import BlockLayout
from spardl.config import Residuals
from spardl.kernels.crew import Bools, Crew
from spardl.kernels.shortlist import Shortlist
from spardl.sparse import Array, Ints, SparseBlocks


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum SGD of one parameter: what the optimizer would have done after synchronisation, done before it.

    An entry that was taken keeps its velocity if it waited for about `prompt` steps or fewer, and the less of it the
    longer it waited (what was taken is as many velocities); 0 leaves none. All parameters of a group have the same.
    """

    weights: Tensor
    momentum: float
    decay: float
    damping: float
    nesterov: bool
    prompt: float = 0.0


@dataclass(frozen=True, slots=True)
class _Added:
    """A stretch of this step: its gradients, and once their blocks have been added up the residual from before it."""

    offset: int
    before: Tensor
    scale: float = 1.0
    momentum: Momentum | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class _Touched:
    """Positions that a collective changed, and what they held before."""

    positions: Tensor
    before: Tensor
    taken: bool


class Accumulator:
    """Residual memory of one group. Offsets are natural; collectives address blocks."""

    def __init__(
        self,
        layout: BlockLayout,
        *,
        residuals: Residuals = "carry",
        momentum: bool = False,
        device: torch.device | str = "cpu",
        crew: Crew | None = None,
    ) -> None:
        self.layout = layout
        self.starts = layout.starts
        self.lengths = layout.lengths
        self.device = torch.device(device)
        self._values = _zeros(layout.length, self.device)
        self.velocity = _zeros(layout.length, self.device) if momentum else None
        self.poisoned = False
        self._residuals = residuals
        self._prompt = 0.0
        self._updated = _zeros(layout.length, self.device) if momentum else None
        self._added: list[_Added] = []
        self._later: list[_Added] = []  # what is to be added in the blocks that wait
        self._waiting = np.zeros(layout.count, np.bool_)
        self._journal: list[_Touched] = []
        self._kernels = kernels.for_device(self.device)
        self._array = self._kernels.array(self._values)  # the same memory
        self._crew = crew or Crew()
        self._shortlist = Shortlist(layout.count) if self.device.type == "cpu" else None
        self._next = 0  # the offset that would be added next, if all is added in order

    # --- one step -------------------------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor:
        """All of the memory, in block order."""
        self.add_up()
        return self._values

    def add(self, offset: int, gradient: Tensor, scale: float = 1.0, momentum: Momentum | None = None) -> bool:
        """Add `scale * gradient` (float32, flat). Until commit or rollback, `gradient` holds the old residual.

        Returns whether all sums are finite; if not, this is poisoned.
        """
        self.add_up()
        self._follow(offset, gradient)
        self._added.append(_Added(offset, gradient, scale, momentum))
        fine = self._add(self._added[-1], np.ones_like(self._waiting))
        self.poisoned |= not fine
        return fine

    def add_later(self, offset: int, gradient: Tensor, scale: float = 1.0, momentum: Momentum | None = None) -> None:
        """`add`, block by block: when one is touched, or `add_up` says so."""
        if not self._waiting.all():
            self.add_up()
        self._follow(offset, gradient)
        self._added.append(_Added(offset, gradient, scale, momentum))
        self._later.append(self._added[-1])
        self._waiting[:] = True

    def add_up(self, ids: Ints | None = None) -> None:
        """Add what has waited, in these blocks (default: all). Poisoned if a sum is not finite."""
        if not self._later:
            return
        wanted = self._waiting.copy()
        if ids is not None and self.starts is self.layout.starts:
            wanted[:] = False
            wanted[ids] = self._waiting[ids]
        if wanted.any():
            self.poisoned |= not self._crew.share(self._add_waiting, wanted)
            self._waiting ^= wanted
            if not self._waiting.any():
                self._later.clear()

    def _add_waiting(self, wanted: Bools) -> bool:
        fine = True
        for added in self._later:
            fine &= self._add(added, wanted)
        return fine

    @property
    def waits(self) -> bool:
        """Whether any block is yet to be added up."""
        return bool(self._later)

    def _add(self, added: _Added, wanted: Bools) -> bool:
        place = (self.layout.starts, self.layout.chunk, added.offset)
        momentum = added.momentum
        if self.velocity is None:
            given = (added.before, added.scale, wanted)
            fine = self._kernels.accumulate(self._array, *place, *given, self._shortlist)
        else:
            assert self._updated is not None and momentum is not None
            self._prompt = momentum.prompt
            fine = self._kernels.accumulate_momentum(
                self._array,
                self.velocity,
                self._updated,
                *place,
                added.before,
                momentum.weights,
                added.scale,
                momentum.momentum,
                momentum.decay,
                momentum.damping,
                momentum.nesterov,
                wanted,
                self._shortlist,
            )
        return bool(fine)

    def _follow(self, offset: int, stretch: Tensor) -> None:
        """The shortlist holds for a step in which everything is added once, in order."""
        if not self._added:
            self._next = 0
            if self._shortlist is not None:
                self._shortlist.begin()
        self._next = self._next + stretch.numel() if offset == self._next else -1

    @property
    def _listed(self) -> Shortlist | None:
        """The shortlist, if there is one that holds now."""
        if self._shortlist is not None and (self._next != self.layout.length or not self._added):
            self._shortlist.give_up()
        return self._shortlist

    def hold(self, offset: int, buffer: Tensor) -> None:
        """Keep this stretch out of the step: it counts as zero, and commit adds its residual back."""
        self._follow(offset, buffer)
        self._added.append(_Added(offset, buffer, held=True))
        if self.velocity is not None:
            assert self._updated is not None
            self.read_from(self.velocity, offset, buffer)
            self._write(self._updated, offset, buffer)
        self.read(offset, buffer)
        self.write(offset, torch.zeros_like(buffer))

    def settle(self, result: SparseBlocks) -> None:
        """Apply the residual policy, knowing the final support: coordinates outside it may go back to their owners.

        carry leaves all as it is. return undoes everything outside the support (the paper's global collection).
        partial and local go by this rank's own values alone, and lose mass: partial keeps them but where they were
        taken and the coordinate survived, local but where they were taken.
        """
        if self._residuals != "carry":
            taken = [touched.positions for touched in self._journal if touched.taken]
            settled = self.positions(result)
            if self._residuals != "return":
                mine = torch.cat(taken).unique() if taken else settled[:0]
                settled = mine if self._residuals == "local" else mine[torch.isin(mine, settled)]
            for touched in reversed(self._journal):
                undone = ~torch.isin(touched.positions, settled)
                self.values[touched.positions[undone]] = touched.before[undone]
            if self._residuals != "return":
                self.values[settled] = 0
        self._journal.clear()

    def commit(self, *, dense: bool = False) -> None:
        """End the step. After a dense one the sums are handed out in place of the gradients and leave this memory."""
        self.add_up()
        for added in self._added:
            if dense:
                total = torch.empty_like(added.before)
                self.read(added.offset, total)
                self.write(added.offset, added.before if added.held else torch.zeros_like(total))
                added.before.copy_(total)
            elif added.held:
                place = (self.layout.starts, self.layout.chunk, added.offset)
                self._kernels.accumulate(self._values, *place, added.before, 1.0, np.ones_like(self._waiting))
        self.velocity, self._updated = self._updated, self.velocity
        self._added.clear()

    def rollback(self) -> None:
        """End the step as if it had never begun: residual and velocity are what they were, bit for bit."""
        self.add_up()
        for added in reversed(self._added):
            self.write(added.offset, added.before)
        self._added.clear()
        self._journal.clear()
        self.poisoned = False

    # --- verbs of the collectives ---------------------------------------------------------------------------------

    def take_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        """Move the `budgets[i]` entries of largest magnitude out of each block `ids[i]`."""
        self.add_up(ids)
        if self.poisoned:
            return SparseBlocks.empty(ids, self.device)
        return self._took(SparseBlocks(ids, *self._kernels.take_largest(*self._blocks(ids, budgets))))

    def take_rounded(self, ids: Ints, budgets: Ints) -> tuple[Ints, Array, Array] | None:
        """The same, but of each entry only the nearest bf16 is taken; the rest stays. Counts, places and codes, or None
        if this is poisoned."""
        assert self.leaves_errors
        self.add_up(ids)
        if not self.poisoned:
            counts, places, codes, fine = self._kernels.take_rounded(*self._blocks(ids, budgets))
            self.poisoned = not fine
        if self.poisoned:
            return None
        if self._updated is not None:
            self._took(SparseBlocks(ids, counts, places, self._kernels.widen_bf16(codes)))
        return counts, places, codes

    @property
    def leaves_errors(self) -> bool:
        """Whether entries can be taken rounded: no policy needs to know their own values."""
        return self._residuals == "carry"

    def _blocks(self, ids: Ints, budgets: Ints) -> tuple[Any, ...]:
        """What the kernels that take entries need to know."""
        listed = (ids, self._listed) if self.starts is self.layout.starts else (None, None)
        return self._array, self.starts[ids], self.starts[ids + 1], budgets, *listed

    def take_largest_of_all(self, budget: int) -> SparseBlocks:
        """Move the `budget` entries of largest magnitude out, wherever they lie."""
        if self.poisoned:
            return SparseBlocks.empty(np.arange(len(self.starts) - 1), self.device)
        whole = self.starts[:1], self.starts[-1:], np.array([budget])
        listed = (np.zeros(1, np.int64), self._listed) if self.layout.count == 1 else ()
        _, indices, values = self._kernels.take_largest(self.values, *whole, *listed)
        return self._took(self._in_blocks(indices, values))

    def take_above_of_all(self, threshold: float, limit: int) -> SparseBlocks:
        """Move entries of magnitude `threshold` or more, the first `limit` of them, out, wherever they lie."""
        if self.poisoned:
            return SparseBlocks.empty(np.arange(len(self.starts) - 1), self.device)
        indices, values = self._take_above(0, self.layout.length, threshold, limit)
        return self._took(self._in_blocks(indices, values))

    def _take_above(self, first: int, stop: int, threshold: float, limit: int) -> tuple[Array, Array]:
        listed = (self._listed,) if self.layout.count == 1 else ()
        taken: tuple[Array, Array] = self._kernels.take_above(self.values, first, stop, threshold, limit, *listed)
        return taken

    def count_above(self, threshold: float) -> int:
        listed = (self._listed,) if self.layout.count == 1 else ()
        return int(self._kernels.count_above(self.values, threshold, *listed))

    def take_above(self, block: int, threshold: float, limit: int) -> SparseBlocks:
        """Move entries of magnitude `threshold` or more, the first `limit` of them, out of a block."""
        ids = np.array([block])
        if self.poisoned:
            return SparseBlocks.empty(ids, self.device)
        first, stop = int(self.starts[block]), int(self.starts[block + 1])
        places, amounts = self._take_above(first, stop, threshold, limit)
        return self._took(SparseBlocks(ids, np.array([len(places)]), places, amounts))

    def find_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        """The `budgets[i]` entries of largest magnitude of each block `ids[i]`; they stay where they are."""
        self.add_up(ids)
        if self.poisoned:
            return SparseBlocks.empty(ids, self.device)
        found = SparseBlocks(ids, *self._kernels.take_largest(*self._blocks(ids, budgets)))
        self.values[self.positions(found)] = found.values
        return found

    def find_above(self, block: int, threshold: float, limit: int) -> SparseBlocks:
        """Entries of magnitude `threshold` or more, the first `limit` of them, of a block; they stay where they are."""
        if self.poisoned:
            return SparseBlocks.empty(np.array([block]), self.device)
        first, stop = int(self.starts[block]), int(self.starts[block + 1])
        places, amounts = self._take_above(first, stop, threshold, limit)
        found = SparseBlocks(np.array([block]), np.array([len(places)]), places, amounts)
        self.values[self.positions(found)] = found.values
        return found

    def count_bins(self, block: int, first: int, shift: int, bins: int) -> Ints:
        """How many magnitudes of a block lie in each bin of 2**shift float32 bit patterns, from bin `first` up."""
        if self.poisoned:
            return np.zeros(bins, np.int64)
        stretch = self.values[int(self.starts[block]) : int(self.starts[block + 1])]
        counts: Ints = self._kernels.count_bins(stretch, first, shift, bins)
        return counts

    def take_at(self, support: SparseBlocks) -> Tensor:
        """Move the values at these coordinates out, whatever they are."""
        if self.poisoned:
            return torch.zeros(len(support), device=self.device)
        values = self.peek(support)
        self.clear(support)
        return values

    def peek(self, entries: SparseBlocks) -> Tensor:
        """The values now held at these coordinates."""
        return self.values[self.positions(entries)]

    def clear(self, entries: SparseBlocks) -> None:
        """Take these coordinates, whatever they hold: their values have been sent by other means."""
        if self.poisoned:
            return
        positions = self.positions(entries)
        taken = SparseBlocks(entries.ids, entries.counts, entries.indices, self.values[positions])
        self.values[positions] = 0
        self._took(taken)

    def give_back(self, entries: SparseBlocks) -> None:
        """Add entries in place: what arrived, what was dropped, or what rounding left over."""
        self.add_up(entries.ids)
        if not len(entries) or self.poisoned:
            return
        if self._residuals != "carry":
            positions = self.positions(entries)
            self._journal.append(_Touched(positions, self.values[positions], taken=False))
        firsts = self.starts[entries.ids]
        added = (firsts, entries.counts, entries.places, entries.amounts)
        listed = (entries.ids, self._listed) if self.starts is self.layout.starts else ()
        if not listed and self._shortlist is not None:
            self._shortlist.give_up()
        self._kernels.scatter_add(self._array, *added, *listed)

    def repartition(self, starts: Ints) -> None:
        """Draw other block boundaries, for methods whose blocks are stretches of natural order and move."""
        assert self.layout.count == 1 and starts[0] == 0 and starts[-1] == self.layout.length
        self.starts = starts
        self.lengths = np.diff(starts)

    def in_present_blocks(self, entries: SparseBlocks, starts: Ints) -> SparseBlocks:
        """Entries that were addressed by blocks at other `starts`."""
        firsts = torch.from_numpy(np.repeat(starts[entries.ids], entries.counts)).to(self.device)
        return self._in_blocks(firsts + entries.indices, entries.values)

    def sorted(self, entries: SparseBlocks) -> SparseBlocks:
        """Entries in any order, in the order of their places."""
        places, order = torch.sort(self.positions(entries))
        return self._in_blocks(places, entries.values[order])

    def _in_blocks(self, found: Array, values: Array) -> SparseBlocks:
        """Entries at ascending places of `values`, addressed by block."""
        places = torch.as_tensor(found)
        if len(self.starts) == 2:
            return SparseBlocks(np.zeros(1, np.int64), np.array([places.numel()]), places.int(), values)
        edges = torch.searchsorted(places, torch.from_numpy(self.starts).to(self.device, places.dtype)).cpu().numpy()
        counts = np.diff(edges)
        firsts = torch.from_numpy(np.repeat(self.starts[:-1], counts)).to(self.device)
        return SparseBlocks(np.arange(len(counts)), counts, (places - firsts).int(), values)

    def positions(self, entries: SparseBlocks) -> Tensor:
        """Where entries lie in `values`."""
        firsts = torch.from_numpy(np.repeat(self.starts[entries.ids], entries.counts)).to(self.device)
        return firsts + entries.indices

    def _took(self, taken: SparseBlocks) -> SparseBlocks:
        if self._updated is not None:
            places = (self.starts[taken.ids], taken.counts, taken.places)
            self._kernels.fade(self._updated, *places, taken.amounts, self._prompt)
        if self._residuals != "carry":
            self._journal.append(_Touched(self.positions(taken), taken.values.clone(), taken=True))
        return taken

    # --- natural order --------------------------------------------------------------------------------------------

    def read(self, offset: int, out: Tensor) -> None:
        """Copy the residual of the natural stretch that begins at `offset` into `out`."""
        self.read_from(self.values, offset, out)

    def write(self, offset: int, source: Tensor) -> None:
        self._write(self.values, offset, source)

    def read_velocity(self, offset: int, out: Tensor) -> None:
        assert self.velocity is not None
        self.read_from(self.velocity, offset, out)

    def write_velocity(self, offset: int, source: Tensor) -> None:
        assert self.velocity is not None
        self._write(self.velocity, offset, source)

    def drop_velocity(self) -> Tensor | None:
        """Momentum ends here; whoever takes it over reads the returned memory by `read_from`."""
        velocity, self.velocity, self._updated = self.velocity, None, None
        return velocity

    def natural(self, result: SparseBlocks, factor: float = 1.0) -> tuple[Array, Array]:
        """Natural positions (ascending) and `factor` times the values of a result that covers all blocks."""
        if self.layout.count == 1:
            return self.positions(result), result.values * factor
        order: tuple[Array, Array] = self._kernels.to_natural_order(
            self.layout.starts, self.layout.chunk, result.counts, result.places, result.amounts, factor
        )
        return order

    def read_from(self, memory: Tensor, offset: int, out: Tensor) -> None:
        """`read`, from other memory in the same order."""
        self._kernels.read(memory, self.layout.starts, self.layout.chunk, offset, out)

    def _write(self, memory: Tensor, offset: int, source: Tensor) -> None:
        self._kernels.write(memory, self.layout.starts, self.layout.chunk, offset, source)


def _zeros(length: int, device: torch.device) -> Tensor:
    """Long-lived memory. On a CPU numpy asks for large pages, which makes access at random places faster."""
    if device.type != "cpu":
        return torch.zeros(length, device=device)
    values = np.empty(length, np.float32)
    values.fill(0)
    return torch.from_numpy(values)
