"""pace="fitted": a slow rank takes fewer steps between exchanges, all ranks know of it, and nothing is lost by it."""

import copy
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

import fakes
from local_updates import attach, shared_weights
from processes import on_processes
from spardl.config import SyncConfig
from spardl.errors import ConfigError, StateError
from spardl.integrations import pace
from spardl.integrations.pace import Pace
from spardl.train.loop import train as train_recipe
from spardl.update import LATE, LocalUpdates, fitted_steps
from training import all_equal, loss_of, mlp, weights_of

SLOWER = (1.0, 2.0, 8.0)  # by rank
FITTED = {"every": 4, "pace": "fitted"}

seconds = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8)


@given(every=st.integers(1, 64), taken=seconds)
def test_nobody_is_late_and_nobody_takes_fewer_steps_than_there_is_time_for(every, taken):
    counts, until = fitted_steps(every, taken), LATE * every * min(taken)
    for count, each in zip(counts, taken, strict=True):
        assert 1 <= count <= every
        assert count == 1 or count * each <= until * (1 + 1e-9)
        assert count == every or (count + 1) * each >= until * (1 - 1e-9)
    assert counts[taken.index(min(taken))] == every


@given(every=st.integers(1, 64), taken=seconds, power=st.integers(-20, 20))
def test_only_how_ranks_compare_matters(every, taken, power):
    assert fitted_steps(every, [2.0**power * each for each in taken]) == fitted_steps(every, taken)
    assert fitted_steps(every, taken[::-1]) == fitted_steps(every, taken)[::-1]


def test_a_rank_of_which_nothing_is_known_takes_all_steps():
    assert fitted_steps(8, [0.0, 0.0]) == [8, 8] and fitted_steps(8, [0.0, 1.0, 4.0]) == [8, 8, 2]


@pytest.fixture(autouse=True)
def known_times(monkeypatch):
    """Steps take what they are said to, and not what they take here."""
    fakes.use(monkeypatch)

    def agree(self, transport):
        self._seconds = [SLOWER[transport.rank]]
        agreed(self, transport)

    agreed = Pace.agree
    monkeypatch.setattr(Pace, "agree", agree)


class Ramp(nn.Module):
    """Its gradient is the same wherever it stands, so that where it must end is known."""

    def __init__(self, elements=300):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(elements))

    def forward(self, slope):
        return self.weights @ slope


def slope_of(rank):
    return torch.randn(300, generator=torch.Generator().manual_seed(rank)) ** 3


def walk(rank, workers, settings, steps):
    model = Ramp()
    optimizer = SGD(model.parameters(), lr=0.5)
    sync = attach(model, optimizer, outer_rate=1.0, **FITTED, **settings)
    taken, shared = 0, []
    for _ in range(steps):
        if not sync.rests():
            optimizer.zero_grad()
            model(slope_of(rank)).backward()
            optimizer.step()
            taken += 1
        shared.append(shared_weights(sync, model))
    sync.flush()
    return weights_of(model), torch.stack(shared), taken, sync.local_steps


@pytest.mark.parametrize("settings", [{"density": 0.05}, {"density": 0.05, "delay": 2}, {"apply": "reset"}], ids=str)
def test_each_step_that_was_taken_counts_once_and_all_ranks_share_the_same_weights(settings):
    """The plain mean: what a rank moved in the steps that it took, over the number of ranks."""
    ranks = on_processes(3, walk, settings, 24)
    assert all_equal(weights for weights, *_ in ranks) and all_equal(shared for _, shared, *_ in ranks)
    assert all(counts == [4, 2, 1] for *_, counts in ranks)
    agreed = 4 * pace.FIRST + settings.get("delay", 0)  # when the exchange has landed beside which ranks agreed
    for count, (_, _, taken, _) in zip([4, 2, 1], ranks, strict=True):
        assert taken == sum(step % 4 < (4 if step < agreed else count) for step in range(24))
    expected = -0.5 * sum(taken * slope_of(rank) for rank, (_, _, taken, _) in enumerate(ranks)) / 3
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-4, atol=1e-4)


def go_on(rank, workers):
    """Weights after 20 steps in one go, and after 10, a state and 10 more; and counts that no rank could have."""

    def some(model, optimizer, sync, steps):
        for step in steps:
            if not sync.rests():
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

    def made():
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, attach(model, optimizer, **FITTED, delay=1)

    whole, again = made(), made()
    some(*whole, range(22))
    state = copy.deepcopy(whole[2].state_dict())  # optimizers hand out their own memory
    again[2].load_state_dict(state)
    for each in (whole, again):
        some(*each, range(22, 40))
    with pytest.raises(StateError, match="which cannot be"):
        again[2].load_state_dict({**state, "local": {**state["local"], "pace": [4, 0]}})
    return weights_of(whole[0]), weights_of(again[0]), state["local"]["pace"]


def test_a_state_holds_who_takes_how_many_steps():
    for whole, again, counts in on_processes(2, go_on):
        assert torch.equal(whole, again) and counts == [4, 2]


def trained(rank, workers):
    rule = LocalUpdates(every=4, pace="fitted")
    return train_recipe(fakes.POINTS, SyncConfig(density=0.1, dense_below=0), rule=rule)


def test_a_recipe_goes_on_with_ranks_that_rest():
    first, second = on_processes(2, trained)
    assert first.parameters_sha256 == second.parameters_sha256 and first.steps == second.steps
    assert first.train_loss == second.train_loss and first.score > 0.3


def even(rank, workers):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, every=2)
    with mock.patch.object(Pace, "agree", side_effect=AssertionError):
        for step in range(8):
            assert not sync.rests()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    return sync.local_steps


def test_nobody_rests_unless_asked_for():
    assert on_processes(2, even) == [[2, 2], [2, 2]]
    with pytest.raises(ConfigError, match="every=2 or more"):
        LocalUpdates(pace="fitted")
