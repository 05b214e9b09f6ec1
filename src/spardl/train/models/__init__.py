"""Models that recipes train, by name. One file per family; none is loaded before it is asked for."""

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spardl.choices import check_choice
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

# name: module:function. A function's parameters without a default are facts that the data set must have.
MODELS: dict[str, str] = {
    "digits-cnn": "spardl.train.models.cnn:digits_cnn",
    "mnist-cnn": "spardl.train.models.cnn:mnist_cnn",
    "resnet20": "spardl.train.models.resnet:resnet20",
    "resnet56": "spardl.train.models.resnet:resnet56",
    "resnet110": "spardl.train.models.resnet:resnet110",
    "resnet18": "spardl.train.models.resnet:resnet18",
    "resnet50": "spardl.train.models.resnet:resnet50",
    "resnet152": "spardl.train.models.resnet:resnet152",
    "resnet18-cifar": "spardl.train.models.resnet:resnet18_cifar",
    "resnet152-cifar": "spardl.train.models.resnet:resnet152_cifar",
    "vgg16": "spardl.train.models.vgg:vgg16",
    "vgg19": "spardl.train.models.vgg:vgg19",
    "alexnet": "spardl.train.models.alexnet:alexnet",
    "googlenet": "spardl.train.models.googlenet:googlenet",
    "inception-v4": "spardl.train.models.inception:inception_v4",
    "inception-v4-cifar": "spardl.train.models.inception:inception_v4_cifar",
    "senet18": "spardl.train.models.senet:senet18",
    "lstm-imdb": "spardl.train.models.lstm:lstm_imdb",
    "lstm-ptb": "spardl.train.models.lstm:lstm_ptb",
    "lstm-wikitext2": "spardl.train.models.lstm:lstm_wikitext2",
    "lstm-small": "spardl.train.models.lstm:lstm_small",
    "neumf": "spardl.train.models.neumf:neumf",
    "neumf-small": "spardl.train.models.neumf:neumf_small",
    "bert-base": "spardl.train.models.bert:bert_base",
    "bert-large": "spardl.train.models.bert:bert_large",
    "bert-small": "spardl.train.models.bert:bert_small",
    "bert-tiny": "spardl.train.models.bert:bert_tiny",
    "gpt-small": "spardl.train.models.gpt:gpt_small",
    "gpt-mini": "spardl.train.models.gpt:gpt_mini",
    "gpt-nano": "spardl.train.models.gpt:gpt_nano",
    "gpt-10m": "spardl.train.models.gpt:gpt_10m",
}


def build_model(name: str, facts: Mapping[str, int], data: str = "the data set") -> "nn.Module":
    """A fresh model for a data set with these facts, its weights drawn from torch's global generator."""
    check_choice("model", name, tuple(MODELS))
    module, _, function = MODELS[name].partition(":")
    make = getattr(importlib.import_module(module), function)
    parameters = inspect.signature(make).parameters
    missing = [key for key, each in parameters.items() if each.default is each.empty and key not in facts]
    if missing:
        raise ConfigError(
            f"model {name} needs to know the {missing[0]} of its data, which {data} does not have;"
            " choose a model for this kind of data."
        )
    model: nn.Module = make(**{key: value for key, value in facts.items() if key in parameters})
    return model
