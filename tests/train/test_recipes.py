"""Recipes name what there is, and are found without being named."""

import pytest

from spardl.errors import ConfigError
from spardl.train.data import DATASETS
from spardl.train.models import MODELS
from spardl.train.recipes import GENERAL, RECIPES, Recipe, choose_recipe, recipe_named


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_names_a_model_and_a_data_set_that_exist(recipe: Recipe) -> None:
    """Nobody finds out after choosing one; and it says what it is."""
    assert recipe.model in MODELS
    assert recipe.data in DATASETS
    assert recipe.summary


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_any_recipe_can_be_tried_in_one_epoch(recipe: Recipe) -> None:
    """Its warm-up and milestones move into it."""
    short = recipe.changed(epochs=1).settings
    assert short.warmup < 1
    assert len(short.milestones) == len(recipe.settings.milestones)


def test_the_published_settings_of_spardl() -> None:
    """VGG-16: warm-up over ten epochs, then a tenth at 81, 122 and 155, batches of 16 at 0.1."""
    settings = recipe_named("vgg16-cifar10").settings
    assert (settings.batch_size, settings.lr, settings.momentum, settings.weight_decay) == (16, 0.1, 0.9, 1e-4)
    assert (settings.warmup, settings.milestones, settings.gamma) == (10, (81, 122, 155), 0.1)


def test_a_recipe_that_does_not_exist_is_answered_with_the_nearest() -> None:
    """A typing error is corrected, not only refused."""
    with pytest.raises(ConfigError, match="Did you mean vgg16-cifar10"):
        recipe_named("vgg16-cifar")


def test_without_any_name_it_is_the_digits() -> None:
    """What needs no files."""
    assert choose_recipe() == recipe_named("digits")


def test_a_model_is_trained_as_a_recipe_knows_it() -> None:
    """Its own data and settings; with other data, its settings."""
    assert choose_recipe(model="resnet20") == recipe_named("resnet20-cifar10")
    other = choose_recipe(model="vgg16", data="cifar100")
    assert (other.model, other.data, other.name) == ("vgg16", "cifar100", "vgg16 on cifar100")
    assert other.settings == recipe_named("vgg16-cifar10").settings


def test_data_alone_are_trained_by_the_first_recipe_for_them() -> None:
    """`--dataset mnist` is enough."""
    assert choose_recipe(data="mnist") == recipe_named("mnist-cnn")


def test_what_no_recipe_knows_is_trained_under_general_settings() -> None:
    """Any model that fits any data can be tried."""
    strange = choose_recipe(model="alexnet", data="cifar10")
    assert strange.settings == GENERAL
    assert (strange.model, strange.data) == ("alexnet", "cifar10")


def test_a_window_belongs_to_its_data() -> None:
    """Other data come with their own."""
    assert choose_recipe("lstm-wikitext2").settings.window == 30
    assert choose_recipe("lstm-wikitext2", data="ptb").settings.window is None
    assert choose_recipe("lstm-wikitext2", data="ptb", given={"window": 20}).settings.window == 20


@pytest.mark.parametrize(("model", "data", "sentence"), [("vg16", None, "vgg16"), (None, "cifar11", "cifar10")])
def test_names_that_do_not_exist_are_refused(model: str | None, data: str | None, sentence: str) -> None:
    """With the nearest one."""
    with pytest.raises(ConfigError, match=f"Did you mean {sentence}"):
        choose_recipe(model=model, data=data)
