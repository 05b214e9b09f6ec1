"""The programs behind docs/questions, on the smallest networks that they can be asked about."""

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks.questions")  # not part of the source distribution

from benchmarks.questions import large, methods, residuals, teams, uneven

from spardl.train.models.gpt import Gpt


def test_the_rule_of_teams_is_close_to_the_best_on_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "ELEMENTS", 50_000)
    found = teams.judge(8, 0.01)
    assert len(found) == len(teams.LATENCIES) * len(teams.RATES)
    assert max(each.lost for each in found) <= 0.05
    assert {each.best.teams for each in found} <= {1, 2, 4, 8}


def test_rounds_and_bytes_make_the_time_of_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "ELEMENTS", 4096)
    cost = teams.cost(4, 2, 0.01)
    assert cost.rounds == 3
    assert cost.seconds(1.0, 1e12) == pytest.approx(3.0)


def test_the_formulas_say_how_methods_grow() -> None:
    """TopkA's traffic grows with the workers, SparDL's does not; dense does not depend on the density."""
    assert methods.predicted("topka", 4096, 0.01, 10**7)[0] > 100 * methods.predicted("topka", 16, 0.01, 10**7)[0]
    assert methods.predicted("spardl", 4096, 0.01, 10**7)[0] < 1.5 * methods.predicted("spardl", 16, 0.01, 10**7)[0]
    assert methods.predicted("dense", 64, 0.01, 10**7) == methods.predicted("dense", 64, 0.001, 10**7)


def test_a_simulated_method_lies_within_its_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "CHECKED_ELEMENTS", 50_000)
    least, most = methods.of_checked("gtopk", 4, 0.01)
    assert least * 0.9 <= methods.simulated("gtopk", 4, 0.01) <= most * 1.15


def test_fewer_steps_win_back_what_a_slow_worker_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven, "ELEMENTS", 5000)
    gradients, _, updates, fitted, _ = uneven.WAYS
    assert gradients.worker(4.0) > 3.5 * gradients.worker(1.0)
    assert updates.worker(4.0) > 3.5 * updates.worker(1.0)
    assert fitted.worker(4.0) < 1.05 * fitted.worker(1.0)


def test_an_adaptive_density_is_what_the_slow_line_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven, "ELEMENTS", 5000)
    monkeypatch.setattr(uneven, "RATE", 1e4)
    *_, adaptive = uneven.WAYS
    assert uneven.throttled(1.0) > 1.5 * uneven.throttled(4.0)
    assert adaptive.line(4.0) < 1.05 * adaptive.line(1.0)


def test_every_policy_trains_and_what_was_trained_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On noise: two steps of each policy, kept in a file, read again, and shown."""
    monkeypatch.setattr(residuals, "WIDTHS", (784, 4, 10))
    monkeypatch.setattr(residuals, "STEPS", 2)
    monkeypatch.setattr(residuals, "DENSITIES", (0.01,))
    noise = residuals.Examples(torch.randn(50, 784), torch.randint(0, 10, (50,)))
    monkeypatch.setattr(residuals, "load", lambda _: noise)
    records = tmp_path / "runs.json"
    residuals.make(records, None, [0, 1])
    runs = residuals.read(records)
    assert Counter(run.policy for run in runs) == {"dense": 2, "carry": 2, "return": 2, "partial": 2, "local": 2}
    assert all(run.losses[0] > 0 and run.steps_to(run.losses[0] + 1) is None for run in runs)
    residuals.show(runs)
    assert "carry" in capsys.readouterr().out


def test_a_quality_is_reached_when_it_stays_reached() -> None:
    run = residuals.Run("carry", 0.01, 0, 125, [3.0, 1.0, 2.0, 0.9, 0.8])
    assert run.steps_to(1.0) == 100 and run.steps_to(0.1) is None


def test_a_step_of_the_large_model_says_what_its_phases_took() -> None:
    model = Gpt(large.BYTES, large.WINDOW, width=16, layers=1, heads=2, dropout=0.0)
    given = large.batch(large.corpus(), torch.Generator().manual_seed(0))
    phases, loss = large.one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), given)
    assert 0 < loss < 20 and phases["step"] >= phases["forward"] + phases["backward and exchange"]


def test_a_measurement_takes_the_place_of_an_older_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(large, "RECORDS", tmp_path / "large.json")
    phases = dict.fromkeys(("step", "forward", "backward and exchange", "optimizer"), 1.0)
    record = {"elements": 3 * 10**8, "seconds": phases, "memory": {"peak": 5e9}, "bytes": 1.0, "losses": [5.0, 4.0]}
    for way, lines in [("a", "loopback"), ("b", "loopback"), ("a", "1gbit"), ("a", "loopback")]:
        large.keep({"way": way, "lines": lines, **record})
    found = large.load()
    assert [(each["way"], each["lines"]) for each in found] == [("b", "loopback"), ("a", "1gbit"), ("a", "loopback")]
    large.show(found)
    assert "a gradient of 1.2 GB" in capsys.readouterr().out
