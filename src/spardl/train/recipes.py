"""Recipes: a model, a data set, and settings under which they are known to work. No torch here until one is used."""

from dataclasses import dataclass

from spardl.config import check_choice
from spardl.train.settings import TrainSettings


@dataclass(frozen=True)
class Recipe:
    """`model` and `data` are names in `MODELS` and `DATASETS`."""

    name: str
    summary: str
    model: str
    data: str
    settings: TrainSettings


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="digits",
            summary="a small CNN on scikit-learn's handwritten digits",
            model="digits-cnn",
            data="digits",
            settings=TrainSettings(epochs=20, batch_size=16, lr=0.1, momentum=0.9, weight_decay=1e-4),
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    check_choice("recipe", name, tuple(RECIPES))
    return RECIPES[name]
