"""Settings say what cannot work, and move together where they belong together."""

from typing import Any

import pytest

from spardl.errors import ConfigError
from spardl.train.settings import TrainSettings, changed

PLAIN = TrainSettings(epochs=10, batch_size=4, lr=0.1)
STEPPED = TrainSettings(
    epochs=160, batch_size=4, lr=0.1, nesterov=True, schedule="milestones", milestones=(80, 120), warmup=10
)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"epochs": 0}, "1 or more"),
        ({"epochs": 1.5}, "epochs train nothing"),
        ({"batch_size": 0}, "hold nothing"),
        ({"accumulate": 0}, "1 or more"),
        ({"lr": float("nan")}, "above 0"),
        ({"optimizer": "sdg"}, "Did you mean sgd?"),
        ({"schedule": "cosinus"}, "Did you mean cosine?"),
        ({"amp": "fp16"}, "no amp 'fp16'"),
        ({"decay": "some"}, "no decay"),
        ({"momentum": 1.0}, r"\[0, 1\)"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov without momentum"),
        ({"optimizer": "adam", "betas": (0.9,)}, "two numbers"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, r"0.9,1 are not two numbers in \[0, 1\)"),
        ({"optimizer": "adam", "epsilon": 0.0}, "above 0"),
        ({"weight_decay": -1.0}, "0 or more"),
        ({"warmup": 10.0}, "does not fit into 10"),
        ({"warmup_start": 2.0}, "from 0 to 1"),
        ({"warmup": 1.0, "warmup_steps": 10}, "1 epochs or 10 steps, not both"),
        ({"warmup_steps": -1}, "warmup-steps -1"),
        ({"floor": 1.5}, "a floor from 0 to 1"),
        ({"floor_step": 0}, "floor-step 0"),
        ({"warmup_steps": 10, "floor_step": 10}, "make floor-step larger"),
        ({"schedule": "milestones"}, "milestones none"),
        ({"schedule": "milestones", "milestones": (5.0, 3.0)}, "ascending"),
        ({"schedule": "milestones", "milestones": (0.0,)}, "above 0"),
        ({"schedule": "milestones", "milestones": (5.0,), "gamma": 1.0}, r"\(0, 1\)"),
        ({"clip": 0.0}, "norm above 0"),
        ({"max_steps": 0}, "max-steps 0 is not 1 or more"),
        ({"window": 0}, "window 0"),
        ({"subset": 0}, "subset 0"),
        ({"eval_every": -1}, "eval-every -1"),
        ({"eval_steps": -1}, "eval-steps -1"),
        ({"loaders": -1}, "loaders -1"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(given: dict[str, Any], sentence: str) -> None:
    """The sentence names it and says what would work."""
    with pytest.raises(ConfigError, match=sentence):
        changed(PLAIN, given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"milestones": (3.0,)}, "milestones belongs to the schedule milestones, and the schedule is cosine"),
        ({"gamma": 0.5}, "gamma belongs to the schedule milestones"),
        ({"schedule": "constant", "floor": 0.1}, "floor belongs to the schedule cosine or linear"),
        ({"betas": (0.9, 0.99)}, "betas belongs to the optimizer adam or adamw, and the optimizer is sgd"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum belongs to the optimizer sgd"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], sentence: str) -> None:
    """What was given must mean something under everything else."""
    with pytest.raises(ConfigError, match=sentence):
        changed(PLAIN, given)


def test_what_was_not_given_makes_way() -> None:
    """Another optimizer or schedule takes along what belongs to the old one, without a word."""
    adam = changed(STEPPED, {"optimizer": "adam", "lr": 0.001})
    assert (adam.nesterov, adam.milestones) == (False, (80, 120))
    assert changed(STEPPED, {"schedule": "cosine"}).milestones == ()
    assert changed(STEPPED, {"momentum": 0.0}).nesterov is False


def test_milestones_and_warm_up_move_with_the_epochs() -> None:
    """A tenth of the epochs is the same training in a tenth of the time; what was given stays where it was put."""
    short = changed(STEPPED, {"epochs": 16})
    assert (short.warmup, short.milestones) == (1.0, (8.0, 12.0))
    own = changed(STEPPED, {"epochs": 16, "milestones": (5.0,), "warmup": 0.0})
    assert (own.warmup, own.milestones) == (0.0, (5.0,))
    assert changed(STEPPED, {"epochs": 160}) == STEPPED


def test_a_warm_up_in_epochs_takes_the_place_of_one_in_steps() -> None:
    """And the other way round; one in steps does not move with the epochs."""
    in_steps = changed(STEPPED, {"warmup_steps": 100})
    assert (in_steps.warmup, in_steps.warmup_steps) == (0.0, 100)
    assert changed(in_steps, {"epochs": 16}).warmup_steps == 100
    in_epochs = changed(in_steps, {"warmup": 5.0})
    assert (in_epochs.warmup, in_epochs.warmup_steps) == (5.0, 0)


def test_adamw_leaves_biases_and_norms_alone_unless_told_otherwise() -> None:
    """The others decay everything unless told otherwise."""
    assert not changed(PLAIN, {"optimizer": "adamw"}).decays_all
    assert changed(PLAIN, {"optimizer": "adamw", "decay": "all"}).decays_all
    assert PLAIN.decays_all and not changed(PLAIN, {"decay": "matrices"}).decays_all


def test_how_long_and_by_whom_does_not_change_the_course() -> None:
    """A checkpoint fits a run that only goes on longer, is tested more often, or loads its data otherwise."""
    assert (
        changed(PLAIN, {"max_steps": 5, "eval_every": 3, "eval_steps": 7, "loaders": 2}).trajectory == PLAIN.trajectory
    )
    assert changed(PLAIN, {"seed": 5}).trajectory != PLAIN.trajectory
