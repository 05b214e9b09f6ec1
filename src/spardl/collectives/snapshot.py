"""A method's saved state, checked before it is used: by type, length, range and order.

A checkpoint is a file from disk, and boundaries that are out of range would send compiled loops out of their arrays.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spardl.choices import is_count, is_number
from spardl.errors import StateError
from spardl.sparse import Ints

LARGEST = 2**62  # count of anything
FLOAT32 = float(np.finfo(np.float32).max)


class Snapshot:
    """What `state_dict` made, for the method named `method`. Every reader raises `StateError` for what cannot be."""

    def __init__(self, method: str, state: object) -> None:
        self._method = method
        self._state: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        if not isinstance(state, Mapping):
            raise self._wrong("it is no mapping")

    def names(self) -> list[str]:
        """The names of all that the snapshot holds."""
        return [str(name) for name in self._state]

    def part(self, name: str) -> "Snapshot":
        """The snapshot under this name, within this one."""
        return Snapshot(f"{self._method}'s {name}", self._get(name))

    def count(self, name: str, *, most: int = LARGEST) -> int:
        """The whole number under this name, from 0 to `most`."""
        value = self._get(name)
        if isinstance(value, bool) or not is_count(value) or value > most:
            raise self._wrong(f"{name} is {value!r}")
        return int(value)

    def number(self, name: str, *, least: float = -math.inf, most: float = math.inf) -> float:
        """The finite number under this name, from `least` to `most`."""
        value = self._get(name)
        if not is_number(value) or not least <= value <= most:
            raise self._wrong(f"{name} is {value!r}")
        return float(value)

    def maybe(self, name: str) -> bool:
        """Whether there is anything under this name."""
        return self._get(name) is not None

    def flag(self, name: str) -> bool:
        """The bool under this name."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong(f"{name} is {value!r}")
        return value

    def boundaries(self, name: str, *, count: int, last: int) -> Ints:
        """Whole numbers that begin with 0, never descend and end with `last`: the edges of `count` stretches."""
        edges = self.counts(name, count=count + 1)
        if edges[0] != 0 or edges[-1] != last or (np.diff(edges) < 0).any():
            raise self._wrong(f"{name} are not {count} stretches of {last}")
        return edges

    def counts(self, name: str, *, count: int) -> Ints:
        """The `count` whole numbers under this name, from 0 to what 32 bits hold: as much as ever travels."""
        values = self.numbers(name, count=count, most=2**31 - 1)
        if (values != np.floor(values)).any():
            raise self._wrong(f"{name} are not {count} whole numbers")
        return values.astype(np.int64)

    def numbers(self, name: str, *, count: int, most: float) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """The `count` numbers under this name, each from 0 to `most`."""
        values = self._get(name)
        if not isinstance(values, list | tuple) or len(values) != count or not all(map(is_number, values)):
            raise self._wrong(f"{name} are not {count} finite numbers")
        if any(not 0 <= value <= most for value in values):
            raise self._wrong(f"{name} are not all between 0 and {most:g}")
        return np.asarray(values, np.float64)

    def _get(self, name: str) -> Any:
        if name not in self._state:
            raise self._wrong(f"{name} is missing")
        return self._state[name]

    def _wrong(self, what: str) -> StateError:
        return StateError(
            f"this state cannot be {self._method}'s here: {what}; load the state of the same model, method and rank."
        )
