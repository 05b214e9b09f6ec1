"""Update rules as settings."""

import pytest

from spardl import ConfigError, LocalUpdates
from spardl.update import PRESETS, RULES, resolve


def test_gradients_are_no_rule_of_their_own_and_take_no_settings_of_local_updates():
    assert resolve("gradients", {"density": 0.1}) == (None, {"density": 0.1})
    with pytest.raises(ConfigError, match="every is a setting of local updates"):
        resolve("gradients", {"every": 5})


def test_settings_go_where_they_belong_and_on_top_of_a_preset():
    rule, others = resolve("diloco", {"every": 7, "density": 0.5, "teams": 2})
    assert rule == LocalUpdates(every=7, apply="reset", outer="nesterov", outer_rate=0.7, outer_momentum=0.9)
    assert others == {"density": 0.5, "teams": 2}


def test_a_rule_as_an_object_takes_settings_on_top():
    assert resolve(LocalUpdates(every=3), {"delay": 1}) == (LocalUpdates(every=3, delay=1), {})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_made(name):
    rule, _ = resolve(name, {})
    assert rule is not None and name in RULES


@pytest.mark.parametrize(("workers", "density"), [(1, 0.01), (4, 1.0)])
def test_the_agreed_mean_is_taken_as_it_is_where_nothing_is_missing_from_it(workers, density):
    assert LocalUpdates().rate(workers, density, bold=True) == 1.0
    assert LocalUpdates().rate(workers, density, bold=False) == 1.0


def test_the_sparser_and_the_more_workers_the_longer_the_step():
    rate = LocalUpdates().rate
    for bold in (False, True):
        rates = [rate(4, density, bold=bold) for density in (0.5, 0.1, 0.05, 0.01)]
        assert rates == sorted(rates)
        assert rate(2, 0.01, bold=bold) < rate(4, 0.01, bold=bold) < rate(8, 0.01, bold=bold)
    assert rate(4, 0.01, bold=False) == rate(4, 0.001, bold=False) == pytest.approx(2.0)


def test_the_agreed_mean_never_becomes_more_than_a_sum():
    """Where next to nothing is sent, each entry comes from one worker; taken once, that is the mean times P."""
    rate = LocalUpdates().rate
    assert pytest.approx(rate(4, 0.01, bold=True)) == 4**0.8
    assert rate(4, 0.002, bold=True) == rate(4, 1e-5, bold=True) == 4


@pytest.mark.parametrize("given", [{"apply": "reset"}, {"outer": "nesterov"}, {"outer": "momentum"}])
def test_where_the_rate_is_published_auto_leaves_it_alone(given):
    assert LocalUpdates(**given).rate(8, 0.01, bold=True) == 1.0
    assert LocalUpdates(**given, outer_rate=0.7).rate(8, 0.01, bold=True) == 0.7
