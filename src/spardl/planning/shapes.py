"""Profiles of well-known models, from their architectures: for tests, benchmarks and plans without a model at hand.

Backward time is spread over the tensors by their floating-point operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from spardl.choices import check_choice
from spardl.planning.profile import Layer, Profile


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter tensor and the multiplications that its layer does with it for one sample."""

    name: str
    elements: int
    operations: int


def resnet50(*, forward: float = 0.090, backward: float = 0.120) -> Profile:
    """ResNet-50 for ImageNet: 161 tensors, 25,557,032 parameters. He et al., CVPR 2016.

    The times are those of OMGS-SGD's ResNet-50 runs (batch 32, P102-100).
    """
    return spread(list(_resnet50()), forward, backward)


def vgg16(*, forward: float = 0.021, backward: float = 0.031) -> Profile:
    """VGG-16 with batch normalisation for CIFAR-10: 54 tensors, 14,728,266 parameters. Simonyan, Zisserman, ICLR 2015.

    The times are those of OMGS-SGD's VGG-16 runs (P102-100).
    """
    return spread(list(_vgg16()), forward, backward)


SHAPES = {"resnet50": resnet50, "vgg16": vgg16}


def shape(name: str) -> Profile:
    """The profile of this name."""
    check_choice("profile", name, tuple(SHAPES))
    return SHAPES[name]()


def spread(weights: list[Weight], forward: float, backward: float) -> Profile:
    """A profile of these tensors, given in forward order."""
    total = sum(weight.operations for weight in weights)
    layers = (Layer(w.name, w.elements, backward * w.operations / total) for w in reversed(weights))
    return Profile(tuple(layers), forward)


def _resnet50() -> Iterator[Weight]:
    yield from _conv("conv1", 3, 64, kernel=7, side=112)
    yield from _norm("bn1", 64, side=112)
    inputs, side = 64, 56
    for stage, (width, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            yield from _conv(f"{name}.conv1", inputs, width, kernel=1, side=side)
            yield from _norm(f"{name}.bn1", width, side)
            side //= stride
            yield from _conv(f"{name}.conv2", width, width, kernel=3, side=side)
            yield from _norm(f"{name}.bn2", width, side)
            yield from _conv(f"{name}.conv3", width, 4 * width, kernel=1, side=side)
            yield from _norm(f"{name}.bn3", 4 * width, side)
            if block == 0:
                yield from _conv(f"{name}.downsample.0", inputs, 4 * width, kernel=1, side=side)
                yield from _norm(f"{name}.downsample.1", 4 * width, side)
            inputs = 4 * width
    yield from _linear("fc", 2048, 1000)


def _vgg16() -> Iterator[Weight]:
    inputs, side, place = 3, 32, 0
    for width, depth in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(depth):
            yield from _conv(f"features.{place}", inputs, width, kernel=3, side=side, bias=True)
            yield from _norm(f"features.{place + 1}", width, side)
            inputs, place = width, place + 3
        side, place = side // 2, place + 1
    yield from _linear("classifier", 512, 10)


def _conv(name: str, inputs: int, outputs: int, *, kernel: int, side: int, bias: bool = False) -> Iterator[Weight]:
    """A convolution whose output has `side` x `side` places."""
    elements = kernel * kernel * inputs * outputs
    yield Weight(f"{name}.weight", elements, elements * side * side)
    if bias:
        yield Weight(f"{name}.bias", outputs, outputs * side * side)


def _norm(name: str, width: int, side: int) -> Iterator[Weight]:
    for part in ("weight", "bias"):
        yield Weight(f"{name}.{part}", width, width * side * side)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", inputs * outputs, inputs * outputs)
    yield Weight(f"{name}.bias", outputs, outputs)
