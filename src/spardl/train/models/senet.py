"""SENet-18: a residual network with pre-activation whose blocks weigh their channels, for images of CIFAR's size.

Hu et al., "Squeeze-and-excitation networks", 2017; He et al., "Identity mappings in deep residual networks", 2016.
"""

from torch import Tensor, nn
from torch.nn.functional import relu

from spardl.train.models.layers import classifier, conv_bn_relu, he_initialised, named


def senet18(classes: int, channels: int) -> nn.Module:
    """Eight blocks of two convolutions: 11,260,354 parameters with 10 classes, 11,306,524 with 100.

    As common for CIFAR, the stem is normalised and rectified, and the last block's sum is not.
    """
    stages = {}
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        first = PreActivationBlock(before, width, stride=1 if stage == 1 else 2)
        stages[f"stage{stage}"] = nn.Sequential(first, PreActivationBlock(width, width, stride=1))
        before = width
    return he_initialised(named(stem=conv_bn_relu(channels, 64, 3), **stages, head=classifier(before, classes)))


class PreActivationBlock(nn.Module):
    """Normalisation and ReLU come before each convolution, so that an identity runs through the whole network."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.weigh = ChannelWeights(width)
        same = before == width and stride == 1
        self.projection = None if same else nn.Conv2d(before, width, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        activated = relu(self.norm1(images))
        shortcut = images if self.projection is None else self.projection(activated)
        added = self.conv2(relu(self.norm2(self.conv1(activated))))
        outputs: Tensor = self.weigh(added) * added + shortcut
        return outputs


class ChannelWeights(nn.Module):
    """A factor in (0, 1) for every channel, from the means of all ("squeeze" and "excitation")."""

    def __init__(self, width: int, reduction: int = 16) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, width // reduction)
        self.excite = nn.Linear(width // reduction, width)

    def forward(self, images: Tensor) -> Tensor:
        weights: Tensor = self.excite(relu(self.squeeze(images.mean(dim=(2, 3))))).sigmoid()
        return weights[:, :, None, None]
