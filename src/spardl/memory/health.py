"""Whether a step can still count: some rank's gradient may not be finite, and a device may know it before the host."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spardl.host import Flag, Question, ask
from spardl.wire import format as wire
from spardl.wire.frame import fault


class Health:
    """Of one open step. A poisoned one is rolled back on all ranks: every frame from then on says so.

    What a device knows, the host is told when the step is over, in one reading with everything else that it has asked
    for (`read`). Until then nothing depends on it: what a poisoned step does is rolled back.
    """

    def __init__(self) -> None:
        self.known_poisoned = False  # without waiting
        self._fine: Tensor | None = None  # on the device: whether nothing is wrong of what the host does not know
        self._asked: list[Question] = []

    @property
    def poisoned(self) -> Flag:
        """Whether this step is to be rolled back, for the header of a frame. Nobody waits: it may be on the device."""
        return self.known_poisoned or (False if self._fine is None else ~self._fine)

    def is_poisoned(self) -> bool:
        """The same, known to the host, which waits once for what it does not know."""
        read([self])
        return self.known_poisoned

    def poison(self) -> None:
        """Let this step be rolled back."""
        self.known_poisoned = True

    def note(self, fine: Flag) -> bool:
        """Poison this step if something is not finite. False if that is known now; of a device it is not known yet."""
        if isinstance(fine, Tensor) and fine.device.type != "cpu":
            self._fine = fine if self._fine is None else self._fine & fine
            return True
        self.known_poisoned |= not fine
        return bool(fine)

    def judge(self, verdict: Tensor, peer: int) -> None:
        """Poison this step if a frame of `peer` is refused, which a device knows. Once it is read, a frame that was
        damaged and not just poisoned is a `ProtocolError`."""
        self.note(verdict == 0)

        def blame(found: NDArray[np.int64]) -> None:
            if found[0] not in (0, wire.POISONED):
                raise fault(int(found[0]), peer)

        self.ask(verdict, blame)

    def ask(self, numbers: Tensor, answer: Callable[[NDArray[np.int64]], None]) -> None:
        """Have these whole numbers read when the step is over; at once, if they are not on a device."""
        if numbers.device.type == "cpu":
            ask([(numbers, answer)])
        else:
            self._asked.append((numbers, answer))

    def questions(self) -> list[Question]:
        """All that the host does not know yet, to be asked now."""
        first: list[Question] = [] if self._fine is None else [(self._fine, self._learn)]
        asked, self._asked, self._fine = self._asked, [], None
        return first + asked

    def _learn(self, fine: NDArray[np.int64]) -> None:
        self.known_poisoned |= not fine[0]

    def reset(self) -> None:
        """Another step begins."""
        self.known_poisoned = False
        self._fine = None
        self._asked.clear()


def read(several: Iterable[Health]) -> None:
    """Let the host know all that these have asked. It waits once for all of them, if a device has to be asked."""
    ask([question for health in several for question in health.questions()])
