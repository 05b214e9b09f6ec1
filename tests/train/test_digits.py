"""What it is for: a hundredth of the gradient, the accuracy of all of it."""

import pytest

from processes import on_processes
from spardl.config import SyncConfig
from spardl.train.loop import train
from spardl.train.recipes import recipe_named


def train_both_ways(rank, workers, seed):
    recipe = recipe_named("digits").changed(seed=seed)
    return [train(recipe, SyncConfig(method=method, density=0.01)) for method in ("dense", "spardl")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_percent_ends_within_one_point_of_dense(seed: int) -> None:
    """The digits recipe as it stands, with four workers: accuracy stays, traffic goes."""
    dense, sparse = on_processes(4, train_both_ways, seed)[0]
    assert sparse.score >= dense.score - 0.01, f"dense {dense.score:.4f}, sparse {sparse.score:.4f}"
    assert sparse.bytes_per_step < dense.bytes_per_step / 100
