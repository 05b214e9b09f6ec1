"""Whether the kernels' shortlist can be relied on: it is complete in a step that sums every value once, in order."""

from spardl.kernels.api import Kernels, Shortlist


class Listing:
    """The shortlist of a buffer of `length` values in `blocks` blocks, where kernels keep one."""

    def __init__(self, kernels: Kernels, blocks: int, length: int) -> None:
        self.shortlist = kernels.new_shortlist(blocks)
        self._length = length
        self._next = -1  # the offset that the next sum must have for the shortlist to be complete

    def begin(self) -> None:
        """A step begins: the shortlist will be complete if every value is summed once, in order."""
        self._next = 0
        if self.shortlist is not None:
            self.shortlist.begin()

    def note_sum(self, offset: int, length: int) -> None:
        """The stretch at `offset` is summed next."""
        self._next = self._next + length if offset == self._next else -1

    def end(self) -> None:
        """The step is over: what was listed in it says nothing of the values now."""
        self._next = -1

    def give_up(self) -> None:
        """Nothing is known any more in this step."""
        if self.shortlist is not None:
            self.shortlist.give_up()

    def valid(self) -> Shortlist | None:
        """The shortlist, given up if it is not complete now."""
        if self._next != self._length:
            self.give_up()
        return self.shortlist
