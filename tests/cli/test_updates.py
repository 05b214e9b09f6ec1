"""What is synchronised, by option: gradients, or weights that each rank steps by itself."""

import re
from pathlib import Path

import pytest

from commands import json_lines, spardl
from spardl.cli.commands import parse
from spardl.cli.options import sync_config
from spardl.cli.updates import chosen_update, chosen_updates
from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigError
from spardl.train.report import rule_name
from spardl.update import PRESETS, LocalUpdates

SMALL = ("--recipe", "gpt-shakespeare", "--workers", 2, "--batch-size", 2, "--warmup-steps", 2)


def chosen(*arguments: str) -> tuple[LocalUpdates | None, SyncConfig]:
    options = parse(["train", *arguments])
    return chosen_update(options, options.update, sync_config(options))


@pytest.fixture
def verses(tmp_path: Path) -> Path:
    """A folder with some kB to read."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = (f"Scene {number}. To be, or not to be: that is the question.\n" for number in range(100))
    (folder / "tinyshakespeare.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def test_gradients_are_synchronised_unless_something_else_is_asked_for() -> None:
    assert chosen("--density", "0.02") == (None, SyncConfig(density=0.02))


def test_settings_of_local_updates_are_options() -> None:
    given = ("--every", "5", "--outer-rate", "2", "--residual-decay", "0.9", "--delay", "1")
    rule, config = chosen("--update", "local", *given)
    assert rule == LocalUpdates(every=5, outer_rate=2.0, residual_decay=0.9, delay=1)
    assert config == SyncConfig()
    assert chosen("--update", "local", "--outer-rate", "auto")[0] == LocalUpdates()


def test_a_rule_may_have_settings_of_its_own() -> None:
    """So that one command compares with and without overlap; they count more than options."""
    options = parse(["compare", "--updates", "local,local:delay=1,diloco:every=20", "--every", "4"])
    rules = [chosen_update(options, name, SyncConfig())[0] for name in chosen_updates(options)]
    assert rules[:2] == [LocalUpdates(every=4), LocalUpdates(every=4, delay=1)]
    assert rules[2] is not None and (rules[2].every, rules[2].outer) == (20, "nesterov")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("local:dealy=1", "delay"),
        ("local:delay=soon", "soon"),
        ("local:adaptive", "adaptive"),
        ("lokal:delay=1", "local"),
    ],
)
def test_a_setting_that_a_rule_does_not_have_is_refused(rule: str, said: str) -> None:
    options = parse(["compare", "--updates", rule])
    with pytest.raises(ConfigError, match=said):
        [chosen_update(options, name, SyncConfig()) for name in chosen_updates(options)]


def test_a_published_way_brings_its_settings_along() -> None:
    """DiLoCo averages everything; what was given counts more, also where it is what would have been the default."""
    rule, config = chosen("--update", "diloco")
    assert rule is not None and (rule.every, rule.outer, config.density) == (50, "nesterov", 1.0)
    rule, config = chosen("--update", "diloco", "--every", "20", "--density", "0.01")
    assert rule is not None and (rule.every, rule.outer, config.density) == (20, "nesterov", 0.01)
    _, config = chosen("--update", "diloco", "--density-warmup", "0.25:50")
    assert config.density == DensitySchedule(0.01, 0.25, 50)


def test_every_published_way_brings_its_method_along_too() -> None:
    for name, preset in PRESETS.items():
        rule, config = chosen("--update", name)
        assert rule is not None and rule_name(rule) == name
        assert config.method == preset.get("method", "spardl") and config.density == preset["density"]


def test_a_file_may_say_it_too(tmp_path: Path) -> None:
    """Under the same names; the command line counts more."""
    path = tmp_path / "run.toml"
    path.write_text('update = "diloco"\nevery = 5\nouter-rate = 0.5\ndensity = 0.01\n')
    rule, config = chosen("--config", str(path), "--every", "7")
    assert rule == LocalUpdates(every=7, apply="reset", outer="nesterov", outer_rate=0.5)
    assert config.density == 0.01


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--update", "lokal"], "Did you mean local?"),
        (["--every", "5"], "every is a setting of local updates"),
        (["--update", "local", "--every", "0"], "give 1 or more"),
        (["--update", "local", "--delay", "2"], "cannot land 2 steps late"),
        (["--update", "local", "--outer-rate", "much"], "'much' is neither a number nor auto"),
        (["--update", "local", "--outer", "adam"], "Choose from plain, momentum, nesterov"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        chosen(*arguments)


def test_settings_of_gradients_are_refused_with_local_updates(verses: Path) -> None:
    """In one sentence, whichever rank says it first."""
    done = spardl("train", *SMALL, "--data-dir", verses, "--update", "local", "--clip-norm", 1)
    assert done.returncode == 2
    assert done.stderr == (
        "spardl: clip_norm is about gradients; with local updates clip gradients as usual, before the optimizer"
        " steps.\n"
    )


@pytest.mark.slow  # tests/train/test_checkpoint.py has the same without the command
def test_a_run_of_local_updates_goes_on_where_it_stopped(verses: Path, tmp_path: Path) -> None:
    """Late landings included: it ends with the same weights, and says how it was synchronised."""
    local = ("--update", "local", "--every", 2, "--delay", 1, "--density", 0.05)
    where = ("--data-dir", verses, "--checkpoint-dir", tmp_path / "ck", "--save-every", 5, "--max-steps", 8)
    done = spardl("train", *SMALL, *local, *where, "--json", tmp_path / "whole.json")
    assert done.returncode == 0, done.stderr
    assert "gpt-shakespeare, spardl, local: 2 workers, " in done.stdout
    assert done.stderr.startswith("spardl, local epoch 1/1: ")
    again = spardl("train", *SMALL, *local, *where, "--resume", tmp_path / "ck" / "step-00000005", "--json", "-")
    assert again.returncode == 0, again.stderr
    (whole,), (resumed,) = json_lines((tmp_path / "whole.json").read_text()), json_lines(again.stdout)
    assert (whole["resumed_at"], resumed["resumed_at"]) == (None, 5)
    assert whole["parameters_sha256"] == resumed["parameters_sha256"]
    assert whole["metric"] == "loss" and whole["figures"] == resumed["figures"]
    assert (whole["update"], whole["rule"]["every"]) == ("local", 2)
