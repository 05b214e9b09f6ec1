"""Models at the size at which they are known, without a data set and without memory for their weights.

No torch before it is asked.
"""

from spardl.choices import check_choice
from spardl.train.models import build_model

# What the data that each model is known for says about it: CIFAR-10 for the small images, ImageNet, English word
# pieces, WikiText-2.
FACTS: dict[str, dict[str, int]] = {
    "resnet20": {"classes": 10, "channels": 3},
    "vgg16": {"classes": 10, "channels": 3},
    "resnet50": {"classes": 1000, "channels": 3},
    "lstm-wikitext2": {"vocabulary": 33_278},
    "bert-base": {"vocabulary": 30_522},
    "bert-large": {"vocabulary": 30_522},
}


def parameter_shapes(name: str) -> tuple[tuple[int, ...], ...]:
    """The shapes of this model's parameters, in order. The model is built of tensors that take no memory."""
    check_sized(name)
    import torch

    with torch.device("meta"):
        model = build_model(name, FACTS[name])
    return tuple(tuple(parameter.shape) for parameter in model.parameters())


def check_sized(name: str) -> None:
    """Refuse a model whose usual data is not written down here."""
    check_choice("model to benchmark", name, tuple(FACTS), hint="or give --elements")
