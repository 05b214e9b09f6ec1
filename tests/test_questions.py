"""The programs behind docs/questions, on the smallest networks that they can be asked about."""

import pytest

pytest.importorskip("benchmarks.questions")  # not part of the source distribution

from benchmarks.questions import methods, teams, uneven


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
    gradients, _, updates, fitted = uneven.WAYS
    assert gradients.worker(4.0) > 3.5 * gradients.worker(1.0)
    assert updates.worker(4.0) > 3.5 * updates.worker(1.0)
    assert fitted.worker(4.0) < 1.05 * fitted.worker(1.0)
