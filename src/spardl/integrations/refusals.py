"""Steps that did not count, because some rank's values were not finite: told once, and an error if there is no end."""

import warnings
from collections.abc import Callable

from spardl.errors import SparDLWarning, StateError

PATIENCE = 10  # refusals in a row


class Refusals:
    """Counts refusals in a row.

    Args:
        once: what to warn of at the first one, with {who} in it.
        often: what to raise at the tenth, with {who} and {count} in it.
    """

    def __init__(self, once: str, often: str) -> None:
        self._once, self._often = once, often
        self._count = 0

    def note(self, counted: bool, who: Callable[[], str]) -> None:
        """A step counted or did not; `who` says on whose account, and is asked only then.

        Raises:
            StateError: this goes on and on.
        """
        self._count = 0 if counted else self._count + 1
        if self._count >= PATIENCE:
            raise StateError(self._often.format(who=who(), count=self._count))
        if self._count == 1:
            warnings.warn(self._once.format(who=who()), SparDLWarning, stacklevel=5)
