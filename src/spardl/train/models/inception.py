"""Inception-v4, for images of ImageNet's size (299 x 299) and of CIFAR's.

Szegedy et al., "Inception-v4, Inception-ResNet and the impact of residual connections on learning", 2016. For small
images the stem halves the image once instead of three times, and every convolution is padded; weights are the same.
"""

from functools import partial

from torch import nn

from spardl.train.models.layers import Branches, classifier, conv_bn_relu, he_initialised, named

_conv = partial(conv_bn_relu, eps=1e-3)


def inception_v4(classes: int, channels: int) -> nn.Module:
    """For ImageNet: 42,679,816 parameters with 1,000 classes."""
    return _inception_v4(classes, channels, small=False)


def inception_v4_cifar(classes: int, channels: int) -> nn.Module:
    """For small images: 41,296,516 parameters with 100 classes."""
    return _inception_v4(classes, channels, small=True)


def _inception_v4(classes: int, channels: int, *, small: bool) -> nn.Module:
    padding = 1 if small else 0
    return he_initialised(
        named(
            stem=_stem(channels, small, padding),
            stage_a=nn.Sequential(*(_module_a() for _ in range(4))),
            reduction_a=_reduction_a(padding),
            stage_b=nn.Sequential(*(_module_b() for _ in range(7))),
            reduction_b=_reduction_b(padding),
            stage_c=nn.Sequential(*(_module_c() for _ in range(3))),
            head=classifier(1536, classes, dropout=0.2),
        )
    )


def _stem(channels: int, small: bool, padding: int) -> nn.Sequential:
    """To 384 channels. Large images: to an eighth of their side; small ones: to half."""
    stride = 1 if small else 2
    return nn.Sequential(
        _conv(channels, 32, 3, stride=stride, padding=padding),
        _conv(32, 32, 3, padding=padding),
        _conv(32, 64, 3),
        Branches(
            nn.MaxPool2d(3, stride=stride, padding=padding),
            _conv(64, 96, 3, stride=stride, padding=padding),
        ),
        Branches(
            nn.Sequential(_conv(160, 64, 1), _conv(64, 96, 3, padding=padding)),
            nn.Sequential(
                _conv(160, 64, 1), _conv(64, 64, (1, 7)), _conv(64, 64, (7, 1)), _conv(64, 96, 3, padding=padding)
            ),
        ),
        Branches(
            _conv(192, 192, 3, stride=2, padding=padding),
            nn.MaxPool2d(3, stride=2, padding=padding),
        ),
    )


def _pooled(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), _conv(before, after, 1))


def _module_a() -> Branches:
    """384 channels to 384."""
    return Branches(
        _conv(384, 96, 1),
        nn.Sequential(_conv(384, 64, 1), _conv(64, 96, 3)),
        nn.Sequential(_conv(384, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        _pooled(384, 96),
    )


def _reduction_a(padding: int) -> Branches:
    """384 channels to 1,024, half the side."""
    return Branches(
        _conv(384, 384, 3, stride=2, padding=padding),
        nn.Sequential(_conv(384, 192, 1), _conv(192, 224, 3), _conv(224, 256, 3, stride=2, padding=padding)),
        nn.MaxPool2d(3, stride=2, padding=padding),
    )


def _module_b() -> Branches:
    """1,024 channels to 1,024; 7 x 7 in two strokes."""
    return Branches(
        _conv(1024, 384, 1),
        nn.Sequential(_conv(1024, 192, 1), _conv(192, 224, (1, 7)), _conv(224, 256, (7, 1))),
        nn.Sequential(
            _conv(1024, 192, 1),
            _conv(192, 192, (7, 1)),
            _conv(192, 224, (1, 7)),
            _conv(224, 224, (7, 1)),
            _conv(224, 256, (1, 7)),
        ),
        _pooled(1024, 128),
    )


def _reduction_b(padding: int) -> Branches:
    """1,024 channels to 1,536, half the side."""
    return Branches(
        nn.Sequential(_conv(1024, 192, 1), _conv(192, 192, 3, stride=2, padding=padding)),
        nn.Sequential(
            _conv(1024, 256, 1),
            _conv(256, 256, (1, 7)),
            _conv(256, 320, (7, 1)),
            _conv(320, 320, 3, stride=2, padding=padding),
        ),
        nn.MaxPool2d(3, stride=2, padding=padding),
    )


def _module_c() -> Branches:
    """1,536 channels to 1,536; 3 x 3 as two strokes side by side."""
    return Branches(
        _conv(1536, 256, 1),
        nn.Sequential(_conv(1536, 384, 1), _cross(384)),
        nn.Sequential(_conv(1536, 384, 1), _conv(384, 448, (3, 1)), _conv(448, 512, (1, 3)), _cross(512)),
        _pooled(1536, 256),
    )


def _cross(before: int) -> Branches:
    return Branches(_conv(before, 256, (1, 3)), _conv(before, 256, (3, 1)))
