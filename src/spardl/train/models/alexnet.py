"""AlexNet, for images of CIFAR's size.

Krizhevsky et al., "ImageNet classification with deep convolutional neural networks", 2012. The widths are those of
"One weird trick" (2014); the first convolution and the poolings are smaller, to leave 2 x 2 of 32 x 32 pixels.
"""

from torch import nn

from spardl.train.models.layers import he_initialised, named


def alexnet(classes: int, channels: int) -> nn.Module:
    """Five convolutions and three linear layers, which hold 90 % of 23,468,874 parameters with 10 classes."""
    features = nn.Sequential(
        nn.Conv2d(channels, 64, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
    head = nn.Sequential(
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256 * 2 * 2, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, classes),
    )
    model = he_initialised(named(features=features, head=head))
    # Nothing is normalised here: hidden layers keep the signal's size, and the last one begins with small scores.
    *hidden, last = (layer for layer in head if isinstance(layer, nn.Linear))
    for layer in hidden:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.normal_(last.weight, std=0.01)
    for layer in (*hidden, last):
        nn.init.zeros_(layer.bias)
    return model
