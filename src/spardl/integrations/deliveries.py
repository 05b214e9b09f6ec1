"""What DDP waits for in a step: one future per bucket, which completes when the whole step has been decided."""

from concurrent.futures import Future as Promise

import torch
from torch import Tensor
from torch.futures import Future


class Deliveries:
    """The futures of one step. A bucket's result is its own memory, or another tensor that is promised."""

    def __init__(self) -> None:
        self._pending: list[tuple[Future[Tensor], Tensor | Promise[Tensor]]] = []

    def begin(self) -> None:
        """A step begins; the last one's futures are complete."""
        self._pending = []

    def expect(self, result: Tensor | Promise[Tensor]) -> Future[Tensor]:
        """A future for one bucket. Through `then`, an exception keeps its text on its way out of it."""
        future: Future[Tensor] = Future()
        self._pending.append((future, result))
        return future.then(lambda done: done.value())

    def complete(self, closed: "Promise[bool]") -> None:
        """The step is over: give out the results, or what went wrong. What was promised is NaN if it did not count."""
        error = closed.exception()
        for future, result in self._pending:
            if error is not None:
                future.set_exception(error)  # type: ignore[arg-type]
            elif isinstance(result, Promise):
                future.set_result(result.result() if closed.result() else result.result() * torch.nan)
            else:
                future.set_result(result)
