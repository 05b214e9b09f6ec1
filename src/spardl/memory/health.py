"""Whether a step can still count: some rank's gradient may not be finite, and a device may know it before the host."""

from torch import Tensor

from spardl.host import Flag, all_hold


class Health:
    """Of one open step. A poisoned one is rolled back on all ranks: every frame from then on says so."""

    def __init__(self) -> None:
        self.known_poisoned = False  # without waiting; what happens until it is known is rolled back as well
        self._unread: list[Tensor] = []  # flags on the device, that nobody has waited for yet

    def is_poisoned(self) -> bool:
        """Whether this step is to be rolled back. The host waits, once, for flags on a device that it has not read."""
        if self._unread:
            self.known_poisoned |= not all_hold(self._unread)
            self._unread.clear()
        return self.known_poisoned

    def poison(self) -> None:
        """Let this step be rolled back."""
        self.known_poisoned = True

    def note(self, fine: Flag) -> bool:
        """Poison this step if something is not finite. False if that is known now; of a device it is not known yet."""
        if isinstance(fine, Tensor):
            self._unread.append(fine)
            return True
        self.known_poisoned |= not fine
        return fine

    def reset(self) -> None:
        """Another step begins."""
        self.known_poisoned = False
        self._unread.clear()
