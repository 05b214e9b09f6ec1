"""What a benchmark synchronises: gradients of well-known models by name, or of any length. No torch before it is asked.

Methods of ours see one flat vector. Low-rank methods need to know the tensors that it is made of.
"""

import math
from dataclasses import dataclass

from spardl.config import check_choice
from spardl.errors import ConfigError
from spardl.train.models import build_model

Shape = tuple[int, ...]

LONGEST = 1_000_000_000

# What the model's data would say about it: CIFAR-10 for the small images, ImageNet, English word pieces, WikiText-2.
FACTS: dict[str, dict[str, int]] = {
    "resnet20": {"classes": 10, "channels": 3},
    "vgg16": {"classes": 10, "channels": 3},
    "resnet50": {"classes": 1000, "channels": 3},
    "lstm-wikitext2": {"vocabulary": 33_278},
    "bert-base": {"vocabulary": 30_522},
    "bert-large": {"vocabulary": 30_522},
}


@dataclass(frozen=True)
class Vector:
    """A gradient: the shapes of its tensors, in order. `model` is empty where it is no model's."""

    model: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def vector_of_model(name: str) -> Vector:
    """The gradient of this model, with its real tensors. Takes no memory for them."""
    check_model(name)
    import torch

    with torch.device("meta"):
        model = build_model(name, FACTS[name])
    return Vector(name, tuple(tuple(parameter.shape) for parameter in model.parameters()))


def vector_of_length(elements: int) -> Vector:
    """One matrix, as square as can be, and what is left over as a vector."""
    check_elements(elements)
    side = math.isqrt(elements)
    matrix = (side, elements // side)
    rest = elements - math.prod(matrix)
    return Vector("", (matrix, (rest,)) if rest else (matrix,))


def check_model(name: str) -> None:
    check_choice("model to benchmark", name, tuple(FACTS), hint="or give --elements")


def check_elements(elements: int) -> None:
    if not 1 <= elements <= LONGEST:
        raise ConfigError(f"a gradient of {elements:,} elements cannot be benchmarked; give 1 to {LONGEST:,}.")
