"""`spardl plan` on real ranks: a ranked table, the line that applies the winner, and a plan that training takes up."""

from pathlib import Path

import pytest

from commands import RANK_VARIABLES, json_lines, spardl
from spardl.cli import execute
from spardl.planning.planfile import PlanFile

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import spardl

width = int(sys.argv[1])
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(width, width))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = spardl.attach(model, optimizer=optimizer, density=0.01)
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    print("step", step, sync.stats().total.steps)
print("the end")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.slow  # starts torch three times, and measures
def test_a_script_is_stopped_after_a_few_steps_and_its_plan_fits_it(tmp_path: Path, script: Path) -> None:
    """Nothing of its own on standard output, and no step of it was exchanged."""
    target = tmp_path / "plan.json"
    done = spardl("plan", "--workers", 2, "--json", "-", "--out", target, "--script", script, 64, 10_000)
    assert done.returncode == 0, done.stderr
    records = json_lines(done.stdout)
    assert sum(record["wins"] for record in records) == 1
    assert {"dense", "topka", "gtopk"} <= {record["title"] for record in records}
    assert all(record["elements"] == 64 * 65 and record["step_s"] > 0 for record in records)
    assert "the end" not in done.stderr and "step 5 0" in done.stderr
    plan = PlanFile.read(target)
    assert (plan.workers, plan.elements) == (2, 64 * 65)
    plan.check_for(2, {"weight": 64 * 64, "bias": 64})
    with pytest.raises(ValueError, match="made for 2 workers"):
        plan.check_workers(3)


@pytest.mark.slow  # starts ranks for each
@pytest.mark.parametrize(
    ("width", "steps", "sentence"), [("wide", 9, "failed on rank"), pytest.param(64, 2, "few", marks=pytest.mark.slow)]
)
def test_a_script_that_fails_or_ends_too_soon_is_said_in_a_sentence(
    script: Path, width: object, steps: int, sentence: str
) -> None:
    done = spardl("plan", "--workers", 2, "--script", script, width, steps)
    assert done.returncode == 2 and sentence in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_recipe_is_ranked_and_trained_by_its_plan(tmp_path: Path) -> None:
    """The table, the line of Python, and a training that takes up the plan; another recipe refuses it."""
    target = tmp_path / "plan.toml"
    done = spardl("plan", "--workers", 2, "--recipe", "digits", "--out", target)
    assert done.returncode == 0, done.stderr
    assert "<- wins" in done.stdout and "What also changes learning" in done.stdout
    assert "spardl.attach(model" in done.stdout or "DistributedDataParallel(model)" in done.stdout
    trained = spardl("train", "--recipe", "digits", "--max-steps", 3, "--plan", target)
    assert trained.returncode == 0 and "2 workers" in trained.stdout, trained.stderr
    other = spardl("train", "--model", "resnet20", "--dataset", "digits", "--max-steps", 3, "--plan", target)
    assert other.returncode == 2 and "made for a model of 151,306 parameters" in other.stderr


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert execute([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


def test_what_cannot_be_planned_is_refused_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path
) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "no script" in refusal(capsys, "plan", "--script", tmp_path / "none.py")
    assert "names no file" in refusal(capsys, "plan", "--script")
    assert "not both" in refusal(capsys, "plan", "--recipe", "digits", "--script", script)
    assert "give --recipe or --script" in refusal(capsys, "plan", "--out", tmp_path / "plan.toml")
    assert "leave --method out" in refusal(capsys, "plan", "--recipe", "digits", "--method", "dense")
    assert "this one is measured" in refusal(capsys, "plan", "--recipe", "digits", "--latency", "1ms")
    assert "there is no folder" in refusal(capsys, "plan", "--recipe", "digits", "--out", tmp_path / "a" / "b.toml")


def test_a_plan_that_does_not_fit_is_refused_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "plan.toml"
    assert "cannot read the plan" in refusal(capsys, "train", "--plan", path)
    PlanFile(2, 10, "0" * 16, "gradients", {"method": "topka", "density": 0.01}).write(path)
    assert "made for 2 workers, and there are 4" in refusal(capsys, "train", "--plan", path, "--workers", 4)
    assert "not both" in refusal(capsys, "train", "--plan", path, "--workers", 2, "--method", "auto")
    assert "nothing to choose" in refusal(capsys, "train", "--method", "auto", "--update", "local-sgd")
    assert "nothing to choose" in refusal(capsys, "train", "--method", "auto", "--density", 1)
    path.write_text(path.read_text().replace("workers = 2", "workers = -2"))
    assert "-2 for workers" in refusal(capsys, "train", "--plan", path)
