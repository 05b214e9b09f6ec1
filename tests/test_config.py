"""Settings: a bad one gets a sentence that says what was given and what to do, wherever it is given."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.choices import is_power_of_two
from spardl.collectives.methods.registry import METHODS, method_class, register
from spardl.config import SyncConfig, configure, options_of
from spardl.density import DensitySchedule
from spardl.errors import ConfigError, SparDLError


@pytest.mark.parametrize("density", [0, -0.1, 1.5, math.nan, math.inf, "abc", "0.01", None, [0.1], 1j, {}])
def test_a_density_that_is_no_share_is_refused(density):
    """Whatever its type: never a TypeError."""
    for make in (
        lambda: SyncConfig(density=density),
        lambda: DensitySchedule(target=density),
        lambda: DensitySchedule(target=0.01, start=density),
    ):
        with pytest.raises(ConfigError, match=r"is outside \(0, 1\]; 0.01 sends one entry in a hundred"):
            make()


@pytest.mark.parametrize("density", [1, 1.0, 0.01, 1e-9, np.float64(0.5)])
def test_any_share_is_a_density(density):
    assert SyncConfig(density=density).density_at(7) == density


@pytest.mark.parametrize(
    "setting,given_value,advice",
    [
        ("method", "sparrdl", "Did you mean spardl?"),
        ("method", "ok", "Did you mean oktopk?"),
        ("method", "nothing like it", "`spardl methods` lists them"),
        ("method", None, "Choose from dense"),
        ("gather", "x", "Choose from auto, recursive, bruck, r, b."),
        ("blocks", "interleave", "Did you mean interleaved?"),
        ("residuals", "cary", "Did you mean carry?"),
        ("values", "fp8", "Choose from fp32, bf16, fp16, int8, int4, int2, int1."),
        ("indices", "elias-fano", "Choose from auto, rice, fixed, raw."),
        ("selection", "lasy", "Did you mean lazy?"),
        ("groups", "modle", "Did you mean model?"),
        ("groups", 0, 'give 1 or more, or groups="model"'),
        ("groups", -3, 'give 1 or more, or groups="model"'),
        ("teams", 0, 'give 1 or more, or teams="auto"'),
        ("teams", -2, 'give 1 or more, or teams="auto"'),
        ("teams", 1.5, 'give 1 or more, or teams="auto"'),
        ("teams", "two", 'give 1 or more, or teams="auto"'),
        ("clip_norm", 0, "give a positive norm or None"),
        ("clip_norm", -1.0, "give a positive norm or None"),
        ("clip_norm", math.nan, "give a positive norm or None"),
        ("timeout", 0, "give a number of seconds above 0"),
        ("timeout", -5, "give a number of seconds above 0"),
        ("timeout", math.nan, "give a number of seconds above 0"),
        ("timeout", math.inf, "at most a month"),
        ("timeout", "x", "give a number of seconds"),
        ("timeout", None, "give a number of seconds"),
        ("groups", None, "give 1 or more"),
        ("groups", 1.5, "give 1 or more"),
        ("clip_norm", "x", "give a positive norm"),
        ("dense_below", -1, "give 0 or more"),
        ("dense_below", "x", "give 0 or more"),
    ],
)
def test_a_bad_setting_is_told_what_to_do(setting, given_value, advice):
    with pytest.raises(ConfigError) as caught:
        SyncConfig(**{setting: given_value})
    sentence = str(caught.value)
    assert advice in sentence
    assert str(given_value) in sentence
    assert sentence.endswith(".")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, SparDLError)


def test_teams_that_do_not_divide_the_workers_are_told_which_do():
    with pytest.raises(ConfigError) as caught:
        SyncConfig(teams=4).check_for(6)
    assert str(caught.value) == (
        '6 workers cannot form 4 equal teams; choose teams from 1, 2, 3, 6 or leave it to teams="auto".'
    )
    with pytest.raises(ConfigError, match="choose teams from 1, 7 or"):
        SyncConfig(teams=14).check_for(7)


def test_recursive_gathering_needs_a_power_of_two():
    with pytest.raises(ConfigError, match=r'not 3; use gather="bruck" or gather="auto"'):
        SyncConfig(teams=3, gather="r").check_for(6)
    assert SyncConfig(teams=3, gather="b").options.gather_of(6) == "bruck"
    assert SyncConfig(teams=4, gather="r").options.gather_of(8) == "recursive"


@pytest.mark.parametrize("workers", range(1, 18))
def test_auto_is_two_teams_for_even_counts_and_always_works(workers):
    options = SyncConfig().options
    assert options.teams_of(workers) == (2 if workers % 2 == 0 else 1)
    assert options.gather_of(workers) == "recursive"
    for teams in (d for d in range(1, workers + 1) if workers % d == 0):
        chosen = SyncConfig(teams=teams)
        chosen.check_for(workers)
        assert chosen.options.teams_of(workers) == teams
        assert chosen.options.gather_of(workers) == ("recursive" if teams in (1, 2, 4, 8, 16) else "bruck")


# --- options of methods ------------------------------------------------------------------------------------------


def test_an_option_that_the_method_does_not_have_is_refused_by_name():
    """And it is said whose it is; a method without teams is not refused for the teams that it would not use."""
    with pytest.raises(ConfigError, match=r"^topka has no option 'teams', which is spardl's; leave it out"):
        SyncConfig(method="topka", teams=3, threshold="published")
    with pytest.raises(ConfigError, match="'threshold', which is exdyna or micro's"):
        SyncConfig(threshold="published")
    with pytest.raises(ConfigError, match=r"there is no setting 'teems'\. Did you mean teams\?"):
        SyncConfig(teems=3)
    SyncConfig(method="topka").check_for(4)


def test_options_may_be_given_as_an_object_or_by_name():
    kind = method_class("spardl").Options
    assert SyncConfig(options=kind(teams=2)) == SyncConfig(teams=2)
    assert SyncConfig(options=kind(teams=2), gather="b").options == kind(teams=2, gather="bruck")
    with pytest.raises(ConfigError, match="are not the options of topka"):
        SyncConfig(method="topka", options=kind(teams=2))


def test_settings_can_be_changed_and_methods_keep_the_options_that_both_have():
    config = SyncConfig(density=0.02, teams=2, blocks="contiguous")
    assert dataclasses.replace(config, teams=4).options.teams == 4
    assert dataclasses.replace(config, density=0.5).options.teams == 2
    other = config.with_method("topkdsa")
    assert (other.method, other.density, vars(other.options)) == ("topkdsa", 0.02, {"blocks": "contiguous"})
    assert configure(config, {"method": "topka", "values": "fp32"}) == SyncConfig(
        method="topka", density=0.02, values="fp32"
    )


@pytest.mark.parametrize("method", METHODS)
def test_options_of_every_method_are_declared_with_a_text(method):
    """The command line, the documents and the errors read what `setting` declares, and nothing else."""
    for name, field in options_of(method).items():
        assert field.metadata["text"], name
        assert field.metadata["choices"] or field.metadata["check"], name


def test_a_method_from_elsewhere_can_be_registered_once():
    try:
        register("mine", "spardl.collectives.methods.topka:TopkA")
        assert SyncConfig(method="mine").method == "mine"
        with pytest.raises(ConfigError, match="there is a method 'mine' already"):
            register("mine", "somewhere:Else")
    finally:
        del METHODS["mine"]
        method_class.cache_clear()


def test_a_method_that_cannot_be_loaded_is_named():
    try:
        register("broken", "spardl.nowhere:Nothing")
        with pytest.raises(
            ConfigError, match=r"'broken' is registered as spardl.nowhere:Nothing, which cannot be loaded"
        ):
            SyncConfig(method="broken")
    finally:
        del METHODS["broken"]
        method_class.cache_clear()


def test_powers_of_two():
    assert [n for n in range(-2, 20) if is_power_of_two(n)] == [1, 2, 4, 8, 16]


def test_settings_are_plain_data_and_do_not_change():
    """They are compared between ranks as JSON."""
    config = SyncConfig(density=DensitySchedule(0.01, 0.25, steps=50))
    again = json.loads(json.dumps(config.to_dict()))
    assert again["density"] == {"target": 0.01, "start": 0.25, "steps": 50, "dense_steps": 0, "settled": None}
    fields = {field.name for field in dataclasses.fields(SyncConfig)} - {"options"}
    assert set(again) == fields | {"teams", "order", "gather", "selection", "blocks"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.method = "dense"


@pytest.mark.parametrize("method", METHODS)
def test_every_listed_method_may_be_chosen(method):
    assert SyncConfig(method=method).method == method


# --- schedules ---------------------------------------------------------------------------------------------------


def test_a_schedule_is_dense_then_falls_geometrically_to_its_target():
    schedule = DensitySchedule(target=0.01, start=0.25, steps=4, dense_steps=2)
    ratio = (0.01 / 0.25) ** 0.25
    expected = [1.0, 1.0, 0.25, 0.25 * ratio, 0.25 * ratio**2, 0.25 * ratio**3, 0.01, 0.01]
    assert [schedule.at(step) for step in range(8)] == pytest.approx(expected)
    assert schedule.at(10**9) == 0.01
    config = SyncConfig(density=schedule)
    assert [config.density_at(step) for step in (0, 2, 6)] == pytest.approx([1.0, 0.25, 0.01])


def test_a_group_may_settle_at_a_density_of_its_own():
    """No less is sent while the schedule is on its way down."""
    schedule = DensitySchedule(target=0.01, start=0.25, steps=4).settling_at(0.05)
    assert [schedule.at(step) for step in (0, 3, 4, 99)] == pytest.approx([0.25, 0.05, 0.05, 0.05])
    assert (schedule.final, DensitySchedule(0.01).final) == (0.05, 0.01)


def test_a_schedule_without_steps_is_its_target_at_once():
    assert DensitySchedule(0.05).at(0) == 0.05
    assert [DensitySchedule(0.05, dense_steps=1).at(step) for step in (0, 1)] == [1.0, 0.05]


@given(
    target=st.floats(1e-6, 1),
    start=st.floats(1e-6, 1),
    steps=st.integers(0, 50),
    dense_steps=st.integers(0, 5),
    step=st.integers(0, 80),
)
def test_a_scheduled_density_is_always_a_density(target, start, steps, dense_steps, step):
    """Between start and target, whichever is larger."""
    density = DensitySchedule(target, start, steps, dense_steps).at(step)
    low, high = min(target, start), max(target, start)
    assert density == 1.0 or low * (1 - 1e-9) <= density <= high * (1 + 1e-9)
    SyncConfig(density=min(density, 1.0))


@pytest.mark.parametrize("steps", [{"steps": -1}, {"dense_steps": -4}])
def test_a_schedule_cannot_last_a_negative_time(steps):
    with pytest.raises(ConfigError, match=f"cannot last {next(iter(steps.values()))} steps; use a whole number"):
        DensitySchedule(0.01, **steps)


@pytest.mark.parametrize("steps", [-1, 1.5, math.nan, "x", None])
def test_a_schedule_lasts_a_whole_number_of_steps(steps):
    with pytest.raises(ConfigError, match="whole number"):
        DensitySchedule(0.01, steps=steps)


def test_numbers_of_numpy_are_numbers():
    assert SyncConfig(density=np.float32(0.5)).density_at(0) == 0.5
