"""What a benchmark synchronises: a gradient, described by the shapes of its tensors.

Methods of ours see one flat vector. Low-rank methods need to know the tensors that it is made of.
"""

import math
from dataclasses import dataclass

from spardl.errors import ConfigError

Shape = tuple[int, ...]

LONGEST = 1_000_000_000


@dataclass(frozen=True)
class Vector:
    """A gradient: the shapes of its tensors, in order. `model` is empty where it is no model's."""

    model: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def vector_of_length(elements: int) -> Vector:
    """One matrix, as square as can be, and what is left over as a vector."""
    check_elements(elements)
    side = math.isqrt(elements)
    matrix = (side, elements // side)
    rest = elements - math.prod(matrix)
    return Vector("", (matrix, (rest,)) if rest else (matrix,))


def check_elements(elements: int) -> None:
    if not 1 <= elements <= LONGEST:
        raise ConfigError(f"a gradient of {elements:,} elements cannot be benchmarked; give 1 to {LONGEST:,}.")
