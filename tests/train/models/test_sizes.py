"""Models of a known size have the tensors that the literature counts."""

import math

import pytest

from spardl.train.models.sizes import parameter_shapes


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("resnet20", 269_722),
        ("vgg16", 14_728_266),
        ("resnet50", 25_557_032),
        ("bert-base", 109_514_298),
        ("bert-large", 335_174_458),
        ("lstm-wikitext2", 31_819_578),
    ],
)
def test_models_have_their_parameters(name: str, elements: int) -> None:
    """By name, with the shapes of their tensors."""
    assert sum(math.prod(shape) for shape in parameter_shapes(name)) == elements
