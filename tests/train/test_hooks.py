"""Rivals: DDP as it is and with torch's hooks, trained by the same loop, with an account of what they send."""

import pytest

from processes import on_processes
from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.train.loop import train
from spardl.train.recipes import recipe_named
from spardl.train.rivals import RIVALS, check_rivals

WORKERS = 2
RECIPE = recipe_named("digits").changed(epochs=1, max_steps=6, batch_size=8, seed=3)


def train_with(rank, workers, rivals):
    dense = SyncConfig(method="dense")
    runs = {name: train(RECIPE, dense, rival=name) for name in rivals}
    return {**runs, "dense": train(RECIPE, dense)}


@pytest.fixture(scope="module")
def reports():
    return on_processes(WORKERS, train_with, list(RIVALS))


@pytest.mark.xdist_group("rivals")
def test_ddp_as_it_is_trains_like_our_dense_method(reports) -> None:
    """Two workers' sums do not depend on their order, so losses are the same but for rounding."""
    for rank in reports:
        assert rank["ddp"].train_loss == pytest.approx(rank["dense"].train_loss, rel=1e-5)
        assert rank["ddp"].method == rank["ddp"].way == "ddp"


@pytest.mark.xdist_group("rivals")
def test_rivals_leave_all_ranks_with_the_same_model(reports) -> None:
    for name in RIVALS:
        assert len({rank[name].parameters_sha256 for rank in reports}) == 1, name


@pytest.mark.xdist_group("rivals")
def test_rivals_say_what_they_send(reports) -> None:
    """A ring of two moves each gradient once; fp16 halves that, and low ranks send less the lower they are."""
    sent = {name: report.bytes_per_step for name, report in reports[0].items()}
    assert sent["ddp"] == sent["dense"] == 4 * reports[0]["ddp"].parameters
    assert sent["fp16"] == sent["ddp"] / 2
    assert sent["powersgd-1"] < sent["powersgd-4"] < sent["ddp"]


def test_a_rival_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="powersgd-4"):
        check_rivals(["ddp", "powersgd4"])
