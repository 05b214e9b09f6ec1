"""What it is for: a hundredth of the gradient, the accuracy of all of it."""

import pytest

from processes import on_processes
from spardl.config import METHODS, SyncConfig
from spardl.train.loop import train
from spardl.train.recipes import recipe_named


def train_digits(rank, workers, seed, methods):
    recipe = recipe_named("digits").changed(seed=seed)
    return {method: train(recipe, SyncConfig(method=method, density=0.01)) for method in methods}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_one_percent_ends_within_one_point_of_dense(seed: int) -> None:
    """The digits recipe as it stands, with four workers: accuracy stays, traffic goes."""
    runs = on_processes(4, train_digits, seed, ["dense", "spardl"])[0]
    dense, sparse = runs["dense"], runs["spardl"]
    assert sparse.score >= dense.score - 0.01, f"dense {dense.score:.4f}, sparse {sparse.score:.4f}"
    assert sparse.bytes_per_step < dense.bytes_per_step / 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_method_trains_digits() -> None:
    """Within one and a half points of dense at 1 %, by the same `attach`."""
    runs = on_processes(4, train_digits, 0, list(METHODS), timeout=800)[0]
    scores = {method: run.score for method, run in runs.items()}
    assert min(scores.values()) >= scores["dense"] - 0.015, scores
