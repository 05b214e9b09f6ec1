"""How loops are launched: what they are given beside their arguments, and for how many tiles."""

from typing import Any

from torch import Tensor

from spardl.kernels.api import Ints
from spardl.kernels.triton.loops import OPTIONS, TILE


def launch(loop: Any, grid: tuple[int, ...], *given: Tensor | int | float) -> None:
    """Run a program of this loop for each place of the grid. What kinds of numbers it is given is said here alone."""
    loop[grid](*given, TILE=TILE, **OPTIONS)


def over(count: int) -> tuple[int]:
    """A program for each tile of so many."""
    return (-(-count // TILE),)


def over_blocks(lengths: Ints, each: int = TILE) -> tuple[int, int]:
    """A program for each tile, or for `each` elements, of the longest block, times blocks."""
    return max(1, -(-int(lengths.max(initial=0)) // each)), lengths.size
