"""Models that recipes train, by name. One file per family; none is loaded before it is asked for."""

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spardl.config import check_choice
from spardl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

# name: module:function. A function's parameters without a default are facts that the data set must have.
MODELS: dict[str, str] = {
    "digits-cnn": "spardl.train.models.cnn:digits_cnn",
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
