"""Arguments of the compiled loops that belong together.

Loops that are called from Python take the fields one by one and put them together first: numba needs 4 us to look
through the NamedTuples that a caller of `take_largest` would give it, as long as such a call takes with a hundred
entries, and nothing for those that it makes itself.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spardl.kernels.api import Ints


class Stretch(NamedTuple):
    """Where a stretch of natural order begins, and how natural order is dealt to blocks."""

    starts: Ints
    chunk: int
    offset: int


class Rule(NamedTuple):
    """What momentum SGD makes of a gradient."""

    scale: np.float32
    momentum: np.float32
    decay: np.float32
    damping: np.float32
    nesterov: bool


class Blocks(NamedTuple):
    """Blocks to take entries out of: their numbers in the shortlist, where they lie, and how many entries each."""

    ids: Ints
    firsts: Ints
    stops: Ints
    budgets: Ints


class Taken(NamedTuple):
    """Room for what is taken: for one entry more than can be. If there is room for codes, entries are taken rounded."""

    counts: Ints
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    codes: NDArray[np.uint16]


class Lists(NamedTuple):
    """The large entries of each block: block b's list begins at `edges[b]`, where there is room up to `edges[b + 1]`.

    lows     the keys from which on entries are listed
    fills    how many entries reach them; more than there is room for if the list is not complete
    places   indices of the listed entries, ascending
    amounts  what is there
    """

    lows: NDArray[np.uint32]
    edges: Ints
    fills: Ints
    places: NDArray[np.int32]
    amounts: NDArray[np.float32]


class BlockList(NamedTuple):
    """The list of one block: from which key on, between which edges, and how many entries reach the key so far."""

    low: np.uint32
    begin: int
    end: int
    fill: int


class NextLists(NamedTuple):
    """What a step has learned for the lists of the next one: the keys from which on, and the room."""

    lows: NDArray[np.uint32]
    rooms: Ints
