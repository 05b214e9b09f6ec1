"""A plan is written and read back as it was; what is damaged or of another model is refused with a sentence."""

from pathlib import Path

import pytest

from spardl.errors import ConfigError
from spardl.planning.planfile import PlanFile, digest_of
from spardl.update import LocalUpdates

SIZES = {"a.weight": 20, "a.bias": 5}
PLAN = PlanFile(
    workers=4,
    elements=25,
    digest=digest_of(SIZES),
    update="gradients",
    settings={"method": "spardl", "density": 0.01, "teams": 2},
    predicted={"step_s": 0.1, "bytes_per_second": None},
)


@pytest.mark.parametrize("name", ["plan.toml", "plan.json"])
def test_a_plan_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    PLAN.write(tmp_path / name)
    found = PlanFile.read(tmp_path / name)
    assert (found.workers, found.elements, found.digest) == (4, 25, PLAN.digest)
    assert found.settings == PLAN.settings and found.predicted["step_s"] == 0.1
    rule, config = found.config()
    assert rule is None and config.method == "spardl" and config.options.teams == 2
    found.check_for(4, dict(reversed(SIZES.items())))


def test_a_plan_of_local_updates_has_their_settings(tmp_path: Path) -> None:
    settings = {"method": "topka", "density": 0.03, "every": 5, "delay": 1}
    PlanFile(2, 25, PLAN.digest, "local", settings).write(tmp_path / "plan.toml")
    rule, config = PlanFile.read(tmp_path / "plan.toml").config()
    assert rule == LocalUpdates(every=5, delay=1) and config.density == 0.03


def test_another_number_of_workers_or_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="made for 4 workers, and there are 3"):
        PLAN.check_for(3, SIZES)
    with pytest.raises(ConfigError, match="25 parameters, and this one has 26"):
        PLAN.check_for(4, {"a.weight": 21, "a.bias": 5})
    with pytest.raises(ConfigError, match="another model: it has as many"):
        PLAN.check_for(4, {"b.weight": 20, "b.bias": 5})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("version = 1\n[made_for", "is damaged"),
        ("version = 2\n", "no plan of version 1"),
        ("nothing = 1\n", "no plan of version 1"),
        ("version = 1\n", "no part 'made_for'"),
        ('version = 1\nmade_for = 3\n[settings]\nmethod = "topka"', "no part 'made_for'"),
        ('version = 1\n[made_for]\nworkers = 0\nelements = 1\n[settings]\nmethod = "topka"', "0 for workers"),
        ('version = 1\n[made_for]\nworkers = true\nelements = 1\n[settings]\nmethod = "topka"', "True for workers"),
        ('version = 1\n[made_for]\nworkers = 1\nelements = 1\n[settings]\nmethod = "topkb"', "no method 'topkb'"),
        ("version = 1\n[made_for]\nworkers = 1\nelements = 1\n[settings]\nmethod = 3", "cannot work"),
        ("version = 1\n[made_for]\nworkers = 1\nelements = 1\n[settings]\ndensity = 2.0", "density 2.0 is outside"),
        ("version = 1\n[made_for]\nworkers = 1\nelements = 1\n[settings]\nevery = 5", "update="),
        ("version = 1\n[made_for]\nworkers = 1\nelements = 1\n[settings]\nupdate = []", "settings that no plan has"),
    ],
)
def test_a_damaged_plan_is_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        PlanFile.read(tmp_path / "plan.toml")


def test_a_plan_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="nor any text"):
        PlanFile.read(tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match="cannot read the plan"):
        PlanFile.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot write the plan"):
        PLAN.write(tmp_path / "folder" / "plan.toml")
