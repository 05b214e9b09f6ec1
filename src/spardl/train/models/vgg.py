"""VGG with batch normalisation, for images of CIFAR's size.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2014, configurations D
and E. On 32 x 32 pixels five poolings leave one, so a single linear layer stands for the paper's three.
"""

from collections.abc import Sequence

from torch import nn

from spardl.train.models.layers import conv_bn_relu, he_initialised, named


def vgg16(classes: int, channels: int) -> nn.Module:
    """13 convolutions: 14,728,266 parameters with 10 classes."""
    return _vgg((2, 2, 3, 3, 3), classes, channels)


def vgg19(classes: int, channels: int) -> nn.Module:
    """16 convolutions: 20,040,522 parameters with 10 classes, 20,086,692 with 100."""
    return _vgg((2, 2, 4, 4, 4), classes, channels)


def _vgg(convolutions: Sequence[int], classes: int, channels: int) -> nn.Module:
    stages = {}
    before = channels
    for stage, (count, width) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True), start=1):
        widths = [before] + [width] * count
        layers = [conv_bn_relu(widths[i], widths[i + 1], 3, bias=True) for i in range(count)]
        stages[f"stage{stage}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
        before = width
    head = nn.Sequential(nn.Flatten(), nn.Linear(before, classes))
    return he_initialised(named(**stages, head=head))
