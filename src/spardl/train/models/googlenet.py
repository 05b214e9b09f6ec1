"""GoogLeNet with batch normalisation, for images of CIFAR's size.

Szegedy et al., "Going deeper with convolutions", 2014. As usual for CIFAR, one 3 x 3 convolution makes the stem, two
3 x 3 stand for each 5 x 5 (as in "Rethinking the Inception architecture", 2015), and there are no auxiliary heads.
"""

from torch import nn

from spardl.train.models.layers import Branches, classifier, conv_bn_relu, he_initialised, named


def googlenet(classes: int, channels: int) -> nn.Module:
    """Nine inception modules: 6,166,250 parameters with 10 classes, 6,258,500 with 100."""
    return he_initialised(
        named(
            stem=conv_bn_relu(channels, 192, 3, bias=True),
            stage3=nn.Sequential(
                _inception(192, 64, (96, 128), (16, 32), 32),
                _inception(256, 128, (128, 192), (32, 96), 64),
                nn.MaxPool2d(3, stride=2, padding=1),
            ),
            stage4=nn.Sequential(
                _inception(480, 192, (96, 208), (16, 48), 64),
                _inception(512, 160, (112, 224), (24, 64), 64),
                _inception(512, 128, (128, 256), (24, 64), 64),
                _inception(512, 112, (144, 288), (32, 64), 64),
                _inception(528, 256, (160, 320), (32, 128), 128),
                nn.MaxPool2d(3, stride=2, padding=1),
            ),
            stage5=nn.Sequential(
                _inception(832, 256, (160, 320), (32, 128), 128),
                _inception(832, 384, (192, 384), (48, 128), 128),
            ),
            head=classifier(1024, classes),
        )
    )


def _inception(before: int, single: int, triple: tuple[int, int], quintuple: tuple[int, int], pooled: int) -> Branches:
    """Four views of the image: 1 x 1, 3 x 3, 5 x 5 and pooled. A pair is (reduced to, widened to)."""
    return Branches(
        conv_bn_relu(before, single, 1, bias=True),
        nn.Sequential(
            conv_bn_relu(before, triple[0], 1, bias=True),
            conv_bn_relu(triple[0], triple[1], 3, bias=True),
        ),
        nn.Sequential(
            conv_bn_relu(before, quintuple[0], 1, bias=True),
            conv_bn_relu(quintuple[0], quintuple[1], 3, bias=True),
            conv_bn_relu(quintuple[1], quintuple[1], 3, bias=True),
        ),
        nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_bn_relu(before, pooled, 1, bias=True)),
    )
