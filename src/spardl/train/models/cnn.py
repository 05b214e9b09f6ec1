"""Small convolutional networks for grey images."""

from torch import nn


def digits_cnn(classes: int) -> nn.Module:
    """Two convolutions and two linear layers for 8 x 8 grey images: 151 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def mnist_cnn(classes: int, channels: int) -> nn.Module:
    """LeNet in the size that became usual, for 28 x 28 images: 431,080 parameters with 10 classes.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998; with ReLU and maximum pooling.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 500),
        nn.ReLU(),
        nn.Linear(500, classes),
    )
