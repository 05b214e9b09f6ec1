"""Recipes: a model, a data set, and settings under which they are known to work. No torch here until one is used."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spardl.config import check_choice
from spardl.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from spardl.train.data import DataSet


@dataclass(frozen=True)
class Recipe:
    """`model` and `data` name functions, as module:function, so that listing recipes loads nothing."""

    name: str
    summary: str
    model: str
    data: str
    settings: TrainSettings

    def build_model(self) -> "nn.Module":
        """A fresh model, its weights drawn from torch's global generator."""
        model: nn.Module = _call(self.model)
        return model

    def load_data(self) -> "DataSet":
        data: DataSet = _call(self.data)
        return data


def _call(reference: str) -> Any:
    module, _, function = reference.partition(":")
    return getattr(importlib.import_module(module), function)()


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="digits",
            summary="a small CNN on scikit-learn's handwritten digits",
            model="spardl.train.models:digits_cnn",
            data="spardl.train.data:digits",
            settings=TrainSettings(epochs=20, batch_size=16, lr=0.1, momentum=0.9, weight_decay=1e-4),
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    check_choice("recipe", name, tuple(RECIPES))
    return RECIPES[name]
