"""The conservation law over a whole simulation: what all ranks put in, what they got out, what they kept."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spardl.memory.layout import BlockLayout
from spardl.simulator.compiled import compiled
from spardl.sparse import Ints

ROUNDING = 1e-5  # of the magnitude of all that was put in


class Balance:
    """Sums per coordinate, in float64. A vector costs one pass, and no copy of it is kept."""

    def __init__(self, workers: int, elements: int) -> None:
        self._workers = workers
        self._missing = np.zeros(elements)
        self._magnitude = np.zeros(elements)
        self._results: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by step and place: seen how often, and what
        self.identical = True

    def put_in(self, first: int, gradient: Tensor) -> None:
        """A rank adds this gradient at these coordinates."""
        here = slice(first, first + gradient.numel())
        _add(gradient.numpy(), self._missing[here], self._magnitude[here])

    def get_out(self, step: int, first: int, average: Tensor) -> None:
        """A rank has this result. All ranks must have the same; it counts for all of them at once."""
        seen, result = self._results.pop((step, first), (0, average))
        if not seen:
            result = average.clone()
            here = slice(first, first + average.numel())
            self._missing[here] -= self._workers * average.numpy().astype(np.float64)
        elif not np.array_equal(result.numpy(), average.numpy()):
            self.identical = False
        if seen + 1 < self._workers:
            self._results[step, first] = (seen + 1, result)

    def keep(self, first: int, layout: BlockLayout, residuals: list[Tensor]) -> None:
        """In the end, ranks keep these residuals, in the order of blocks."""
        total, size = np.zeros(layout.length), np.zeros(layout.length)
        for residual in residuals:
            _add(residual.numpy(), total, size)
        order = places(layout)
        here = slice(first, first + layout.length)
        self._missing[here] -= total[order]
        self._magnitude[here] += size[order]

    @property
    def conserved(self) -> bool:
        """Whether, at every coordinate, as much came out and stayed as went in, to float32 accuracy."""
        return self.identical and bool((np.abs(self._missing) <= ROUNDING * self._magnitude + 1e-30).all())

    @property
    def lost_share(self) -> float:
        """What is missing, as a share of the magnitude of all that was put in."""
        put_in = float(self._magnitude.sum())
        return float(np.abs(self._missing).sum()) / put_in if put_in else 0.0


@compiled
def _add(values: NDArray[np.float32], total: NDArray[np.float64], magnitude: NDArray[np.float64]) -> None:
    for place in range(values.size):
        total[place] += values[place]
        magnitude[place] += abs(values[place])


def places(layout: BlockLayout) -> Ints:
    """Where each element of natural order lies in the order of blocks."""
    element = np.arange(layout.length)
    chunk = element // layout.chunk
    found: Ints = layout.starts[chunk % layout.count] + chunk // layout.count * layout.chunk + element % layout.chunk
    return found
