"""Residual networks, for images of CIFAR's size and of ImageNet's.

He et al., "Deep residual learning for image recognition", 2015. Two lines of descent: the thin ones of section 4.2
(resnet20, 56, 110; shortcuts without parameters) and the wide ones of section 4.1 (resnet18, 50, 152; projections),
which also come with a stem for small images, as `resnet18-cifar` and `resnet152-cifar`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from spardl.train.models.layers import classifier, conv_bn_relu, he_initialised, named


def resnet20(classes: int, channels: int) -> nn.Module:
    """For CIFAR: 269,722 parameters with 10 classes."""
    return _thin(3, classes, channels)


def resnet56(classes: int, channels: int) -> nn.Module:
    """For CIFAR: 853,018 parameters with 10 classes."""
    return _thin(9, classes, channels)


def resnet110(classes: int, channels: int) -> nn.Module:
    """For CIFAR: 1,727,962 parameters with 10 classes."""
    return _thin(18, classes, channels)


def resnet18(classes: int, channels: int) -> nn.Module:
    """For ImageNet: 11,689,512 parameters with 1,000 classes."""
    return _wide(_large_stem(channels), (2, 2, 2, 2), _basic, 1, classes)


def resnet50(classes: int, channels: int) -> nn.Module:
    """For ImageNet: 25,557,032 parameters with 1,000 classes."""
    return _wide(_large_stem(channels), (3, 4, 6, 3), _bottleneck, 4, classes)


def resnet152(classes: int, channels: int) -> nn.Module:
    """For ImageNet: 60,192,808 parameters with 1,000 classes."""
    return _wide(_large_stem(channels), (3, 8, 36, 3), _bottleneck, 4, classes)


def resnet18_cifar(classes: int, channels: int) -> nn.Module:
    """ResNet-18 for small images: 11,173,962 parameters with 10 classes, 11,220,132 with 100."""
    return _wide(conv_bn_relu(channels, 64, 3), (2, 2, 2, 2), _basic, 1, classes)


def resnet152_cifar(classes: int, channels: int) -> nn.Module:
    """ResNet-152 for small images: 58,156,618 parameters with 10 classes."""
    return _wide(conv_bn_relu(channels, 64, 3), (3, 8, 36, 3), _bottleneck, 4, classes)


class Residual(nn.Module):
    """What the body adds to its input, rectified."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.body(images) + self.shortcut(images))


class Subsample(nn.Module):
    """A shortcut without parameters (the paper's option A): every other pixel, and zeros for the added channels."""

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def forward(self, images: Tensor) -> Tensor:
        return pad(images[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))


def _projection(before: int, after: int, stride: int) -> nn.Module:
    """A shortcut that learns (option B)."""
    return nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))


def _basic(before: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        conv_bn_relu(before, width, 3, stride=stride),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
    )


def _bottleneck(before: int, width: int, stride: int) -> nn.Sequential:
    """Four times as wide outside as inside. The 3 x 3 convolution has the stride, as is practice since the paper."""
    return nn.Sequential(
        conv_bn_relu(before, width, 1),
        conv_bn_relu(width, width, 3, stride=stride),
        nn.Conv2d(width, 4 * width, 1, bias=False),
        nn.BatchNorm2d(4 * width),
    )


def _large_stem(channels: int) -> nn.Sequential:
    return nn.Sequential(conv_bn_relu(channels, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))


def _thin(blocks: int, classes: int, channels: int) -> nn.Module:
    """Three stages of so many blocks, 16, 32 and 64 wide: 6 x blocks + 2 layers."""
    stages = {}
    before = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        first = Residual(
            _basic(before, width, width // before), Subsample(width - before) if stage > 1 else nn.Identity()
        )
        rest = [Residual(_basic(width, width, 1), nn.Identity()) for _ in range(blocks - 1)]
        stages[f"stage{stage}"] = nn.Sequential(first, *rest)
        before = width
    return he_initialised(named(stem=conv_bn_relu(channels, 16, 3), **stages, head=classifier(64, classes)))


def _wide(
    stem: nn.Module,
    blocks: Sequence[int],
    body: Callable[[int, int, int], nn.Sequential],
    expansion: int,
    classes: int,
) -> nn.Module:
    """Four stages, 64, 128, 256 and 512 wide times `expansion`; each but the first halves the image."""
    stages = {}
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        after = width * expansion
        stride = 1 if stage == 0 else 2
        same = before == after and stride == 1
        first = Residual(body(before, width, stride), nn.Identity() if same else _projection(before, after, stride))
        rest = [Residual(body(after, width, 1), nn.Identity()) for _ in range(count - 1)]
        stages[f"stage{stage + 1}"] = nn.Sequential(first, *rest)
        before = after
    return he_initialised(named(stem=stem, **stages, head=classifier(before, classes)))
