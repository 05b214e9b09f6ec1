"""A thorough survey keeps to its seconds: those likely to win come first, and who comes too late is left out."""

import pytest

from spardl.config import SyncConfig
from spardl.planning import survey as surveys
from spardl.planning.budget import Budget
from spardl.planning.candidates import rivals
from spardl.planning.choose import Trial
from spardl.planning.links import Links

LINKS = Links.uniform(4, latency=1e-4, rate=1e8)
SIZES = [1000, 100]


class Alone:
    """A transport of which only gathering is asked."""

    def gather_texts(self, text: str) -> list[str]:
        return [text]


def surveyed(monkeypatch, *, seconds: float, each: float | None = None):
    """Trials call by call, what was found, and how long all took; a call takes `each` seconds, or as told."""
    now, calls = [0.0], []

    def conduct(candidates, transport, links, sizes, *, seconds):
        now[0] += seconds if each is None else each
        calls.append((list(candidates), seconds))
        return {candidate: Trial(1100, 0.001, 100.0) for candidate in candidates}

    monkeypatch.setattr(surveys, "conduct", conduct)
    dense, *sparse = rivals(SyncConfig(density=0.01), None, LINKS, sum(SIZES))
    budget = Budget(seconds, lambda: now[0])
    found = surveys._in_time(dense, sparse, Alone(), LINKS, SIZES, budget, surveys.FINALS * seconds)
    return calls, found, now[0], sparse


def test_with_time_all_have_trials_and_the_best_two(monkeypatch) -> None:
    calls, found, taken, sparse = surveyed(monkeypatch, seconds=10.0)
    assert set(sparse) < set(found) and len(found) == len(sparse) + 1
    assert calls[-1][0][0].is_dense and len(calls[-1][0]) == surveys.AT_ONCE
    assert taken == pytest.approx(10.0) and calls[-1][1] == pytest.approx(surveys.FINALS * 10.0)


@pytest.mark.parametrize("each", [1.0, 3.0, 20.0])
def test_without_time_those_that_are_likely_to_win_are_left(monkeypatch, each: float) -> None:
    calls, found, taken, _ = surveyed(monkeypatch, seconds=4.0, each=each)
    assert {candidate.config.method for candidate in calls[0][0]} <= set(surveys.QUICK)
    assert any(candidate.is_dense for candidate in found)
    assert taken <= max(4.0, each) + each
