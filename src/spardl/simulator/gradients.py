"""What workers synchronise: gradients that are made up, and gradients that were recorded in a real run."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from spardl.errors import ConfigError, DataError

MOST_RANKS = 1 << 13
FORMAT = "spardl gradients 1"


class Gradients(Protocol):
    """A source of gradients. Every one is a function of step, rank and place, so they need not be kept."""

    def fill(self, step: int, rank: int, first: int, out: Tensor) -> None:
        """Write what the rank has in this step, from element `first` on, to `out` (flat, float32)."""
        ...


class HeavyTailed:
    """Cubes of normal numbers: a few entries are large, as in real gradients.

    `overlap` is how much workers have in common, from 0 (nothing: each has large entries of its own) to 1 (all have the
    same gradient): the correlation of the normal numbers of two workers.
    """

    def __init__(self, seed: int = 0, overlap: float = 0.0) -> None:
        if not 0 <= overlap <= 1:
            raise ConfigError(f"an overlap of {overlap} cannot be; give 0 (nothing in common) to 1 (all the same).")
        self._seed = seed
        self._overlap = overlap
        self._common: tuple[tuple[int, int, int], Tensor] | None = None

    def fill(self, step: int, rank: int, first: int, out: Tensor) -> None:
        self._normal(step, rank, first, out)
        if self._overlap:
            out.mul_(math.sqrt(1 - self._overlap)).add_(self._shared(step, first, out), alpha=math.sqrt(self._overlap))
        torch.pow(out, 3, out=out)

    def _shared(self, step: int, first: int, like: Tensor) -> Tensor:
        """What all ranks have in common; kept for the next rank."""
        key = (step, first, like.numel())
        if self._common is None or self._common[0] != key:
            self._common = key, torch.empty_like(like)
            self._normal(step, MOST_RANKS - 1, first, self._common[1])
        return self._common[1]

    def _normal(self, step: int, rank: int, first: int, out: Tensor) -> None:
        number = ((self._seed * 1_000_003 + step) * MOST_RANKS + rank) * 1_000_033 + first
        torch.randn(out.numel(), generator=torch.Generator().manual_seed(number % (1 << 63)), out=out)


class Ahead:
    """Another source, whose gradient for the next rank is made on a thread while this rank's is worked on."""

    def __init__(self, source: Gradients) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._next: tuple[tuple[int, int, int, int], Future[Tensor]] | None = None
        self._memory: list[Tensor] = []

    def fill(self, step: int, rank: int, first: int, out: Tensor) -> None:
        made = self._made((step, rank, first, out.numel()))
        if made is None:
            self._source.fill(step, rank, first, out)
        else:
            out.copy_(made)
            self._memory = [made]
        spare = self._memory.pop() if self._memory else torch.empty_like(out)
        self._next = (step, rank + 1, first, out.numel()), self._thread.submit(self._make, step, rank + 1, first, spare)

    def _made(self, key: tuple[int, int, int, int]) -> Tensor | None:
        if self._next is None:
            return None
        expected, future = self._next
        made = future.result()
        return made if expected == key else None

    def _make(self, step: int, rank: int, first: int, out: Tensor) -> Tensor:
        self._source.fill(step, rank, first, out)
        return out

    def close(self) -> None:
        """No more is needed."""
        self._thread.shutdown()


class Recorded:
    """Gradients of some steps of a real run (`spardl train --record-gradients`), over and over.

    More workers than were recorded take them in turn, each with its elements moved on by some places, so that no two
    have large entries at the same coordinates by being copies. A shorter vector takes the first elements, a longer one
    begins again.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values  # by step, worker and element
        self.steps, self.workers, self.elements = values.shape

    def fill(self, step: int, rank: int, first: int, out: Tensor) -> None:
        turn, worker = divmod(rank, self.workers)
        row = self._values[step % self.steps, worker]
        at = (first + turn * 7919) % self.elements
        done = 0
        while done < out.numel():
            piece = row[at : at + out.numel() - done]
            out[done : done + piece.numel()] = piece
            done, at = done + piece.numel(), 0


def save(path: str | Path, values: Tensor) -> None:
    """Write gradients by step, worker and element to a file that `load` accepts."""
    torch.save({"format": FORMAT, "gradients": values}, path)


def load(path: str | Path) -> Recorded:
    """Read gradients that a run has recorded.

    Raises:
        DataError: there is no such file, or something else is in it.
    """
    try:
        found: Any = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:
        raise DataError(f"{path} holds no gradients; it is damaged, or --record-gradients did not write it.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} holds no gradients; record some with `spardl train --record-gradients FILE`.")
    values = found.get("gradients")
    if not (isinstance(values, Tensor) and values.dim() == 3 and values.numel() and values.is_floating_point()):
        raise DataError(f"the gradients of {path} are not given by step, worker and element; record them anew.")
    if not values.isfinite().all():
        raise DataError(f"{path} holds gradients that are not finite, which no step would count; record others.")
    return Recorded(values.float())
