"""What a collective may do with this rank's gradients: take entries out, turn them into frames, add what arrives.

The accumulator *is* the residual: gradients are added to a buffer, a selection takes entries out, what arrives is added
in place, and what nobody took stays for the next step. So nothing can be lost by forgetting to store it.

This is the only face of a rank's memory that programs see. `frames` makes and opens messages, `algebra` adds and cuts
entries, `addresses` says in which blocks they lie, `survey` answers questions about values, `health` whether the step
can still count. A poisoned memory gives and takes nothing.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from spardl.memory.addresses import Addresses
from spardl.memory.algebra import Algebra
from spardl.memory.found import Found
from spardl.memory.frames import Account, Frames
from spardl.memory.residuals import Carry
from spardl.memory.survey import Survey
from spardl.memory.transaction import Transaction
from spardl.sparse import Ints, SparseBlocks
from spardl.wire.frame import Codec, CodedBlocks


class Memory:
    """One group's memory during a step: a transaction, a residual policy and a wire format."""

    def __init__(self, transaction: Transaction, codec: Codec, policy: Carry | None = None) -> None:
        self._transaction = transaction
        self._buffer = transaction.buffer
        self.health = transaction.health
        self._journal = None if policy is None else policy.journal
        self.frames = Frames(self, codec, Account())
        self.algebra = Algebra(self._buffer)
        self.addresses = Addresses(self._buffer)
        self.survey = Survey(transaction)

    # --- the whole ------------------------------------------------------------------------------------------------

    @property
    def fills(self) -> bool:
        """Whether the host would have to wait for a count: selections then have as many entries as they may, and ranks
        do best to tell each other counts before they send what was counted."""
        return self._buffer.kernels.fills

    @property
    def lengths(self) -> Ints:
        """The number of elements of each block."""
        return self._buffer.lengths

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """What there is to do while messages travel: adding up the blocks that wait for it, if any do."""
        return self._transaction.add_up if self._transaction.waits else None

    def everything(self) -> Tensor:
        """All sums, in block order, to be summed over ranks in place."""
        self._transaction.add_up()
        return self._buffer.values

    def nothing(self, ids: Ints) -> SparseBlocks:
        """These blocks, without an entry."""
        return SparseBlocks.empty(ids, self._buffer.device)

    # --- taking ---------------------------------------------------------------------------------------------------

    def take_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        """Move the `budgets[i]` entries of largest magnitude out of each block `ids[i]`."""
        self._transaction.add_up(ids)
        if self.health.known_poisoned:
            return self.nothing(ids)
        with record_function("spardl::select"):
            return self._took(self._buffer.take_largest(ids, budgets))

    def take_coded(self, ids: Ints, budgets: Ints) -> CodedBlocks:
        """The `budgets[i]` largest entries of each block `ids[i]`, in the wire's format; rounding errors stay here."""
        if not self.frames.codec.format.rounds_in_place:
            return self.frames.code(self.take_largest(ids, budgets))
        self._transaction.add_up(ids)
        if not self.health.known_poisoned:
            with record_function("spardl::select"):
                counts, places, codes, fine = self._buffer.take_rounded(ids, budgets)
            if self.health.note(fine):
                coded = self.frames.codec.coded(ids, counts, places, codes)
                if self._transaction.velocity is not None:
                    self._transaction.velocity.fade(coded.decode())
                if self._journal is not None:
                    rounded = coded.decode()  # what was taken is this and what is left there, to the bit
                    self._journal.took(self._buffer.positions(rounded), rounded.values + self._buffer.at(rounded))
                return coded
        return self.frames.nothing(ids)

    def take_largest_of_all(self, budget: int) -> SparseBlocks:
        """Move the `budget` entries of largest magnitude out, wherever they lie; addressed as one block."""
        self._transaction.add_up()
        if self.health.known_poisoned:
            return self.nothing(np.zeros(1, np.int64))
        with record_function("spardl::select"):
            return self._took(self._buffer.take_largest_of_all(budget))

    def take_above_of_all(self, threshold: float, limit: int, *, counted: bool = False) -> SparseBlocks:
        """Move the first `limit` entries of magnitude `threshold` or more out, wherever they lie; addressed as one
        block. On a device the host waits for their number, unless it is `counted` and the limit no more than that."""
        self._transaction.add_up()
        if self.health.known_poisoned:
            return self.nothing(np.zeros(1, np.int64))
        if self.fills and not counted:
            limit = min(limit, self.survey.count_above(threshold))
        return self._took(self._buffer.take_above_of_all(threshold, limit))

    def take_at(self, support: SparseBlocks) -> Tensor:
        """Move the values at these coordinates out, whatever they are; in their order."""
        self._transaction.add_up()
        if self.health.known_poisoned:
            return self.algebra.zeros(len(support))
        values = self._buffer.at(support)
        self._buffer.put(SparseBlocks(support.ids, support.counts, support.places, torch.zeros_like(values)))
        self._took(SparseBlocks(support.ids, support.counts, support.indices, values))
        return values

    def _took(self, taken: SparseBlocks) -> SparseBlocks:
        if self._transaction.velocity is not None:
            self._transaction.velocity.fade(taken)
        if self._journal is not None:
            self._journal.took(self._buffer.positions(taken), taken.values.clone())
        return taken

    # --- looking --------------------------------------------------------------------------------------------------

    def find_largest(self, ids: Ints, budgets: Ints) -> SparseBlocks:
        """The `budgets[i]` entries of largest magnitude of each block `ids[i]`; they stay where they are."""
        self._transaction.add_up(ids)
        if self.health.known_poisoned:
            return self.nothing(ids)
        found = self._buffer.take_largest(ids, budgets)
        self._buffer.put(found)
        return found

    def find_above(self, block: int, threshold: float, limit: int) -> Found:
        """The first `limit` entries of magnitude `threshold` or more of a block; they stay where they are."""
        self._transaction.add_up()
        if self.health.known_poisoned:
            return Found.at_hand(self.nothing(np.array([block])))

        def look(count: int) -> SparseBlocks:
            found = self._buffer.take_above(block, threshold, count)
            self._buffer.put(found)
            return found

        if not self.fills:
            return Found.at_hand(look(limit))
        count = torch.as_tensor(self._buffer.count_above_in(block, threshold))
        return Found(count.clamp(max=limit), look)

    # --- giving ---------------------------------------------------------------------------------------------------

    def give_back(self, entries: SparseBlocks) -> None:
        """Add entries in place: what arrived, what was dropped, or what rounding left over."""
        self._transaction.add_up(entries.ids)
        if not len(entries) or self.health.known_poisoned:
            return
        if self._journal is not None:
            self._journal.gave(self._buffer.positions(entries), self._buffer.at(entries))
        self._buffer.add(entries)

    # --- blocks that move -----------------------------------------------------------------------------------------

    def repartition(self, starts: Ints) -> None:
        """Draw other block boundaries, for methods whose blocks are stretches of natural order and move."""
        self._buffer.repartition(starts)
