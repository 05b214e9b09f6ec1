"""Pieces that several convolutional families share."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]


def named(**parts: nn.Module) -> nn.Sequential:
    """The parts one after the other, each under its name."""
    return nn.Sequential(OrderedDict(parts))


def conv_bn_relu(
    before: int,
    after: int,
    kernel: Size,
    *,
    stride: int = 1,
    padding: Size | None = None,
    bias: bool = False,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU. Padded by default so that the image keeps its size at stride 1."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride=stride, padding=padding, bias=bias),
        nn.BatchNorm2d(after, eps=eps),
        nn.ReLU(inplace=True),
    )


class Branches(nn.Module):
    """All branches see the same input; their channels are put side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in self.branches], dim=1)


def classifier(features: int, classes: int, *, dropout: float = 0.0) -> nn.Sequential:
    """The mean over the image, then one linear layer."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout) if dropout else nn.Identity(),
        nn.Linear(features, classes),
    )


def he_initialised(model: nn.Sequential) -> nn.Sequential:
    """Draw convolutions so that gradients keep their size on the way back.

    He et al., "Delving deep into rectifiers", 2015.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
