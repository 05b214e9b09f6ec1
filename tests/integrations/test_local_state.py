"""Local updates that are saved and go on: exactly, on other ranks, and not from what is damaged."""

import copy

import pytest
import torch
from torch.optim import AdamW

import spardl
from local_updates import Normed, attach, shared_weights
from processes import on_processes
from training import all_equal, mlp, sgd, train, weights_of

RULES = [
    {},
    {"delay": 1},
    {"every": 3, "delay": 2},
    {"outer": "nesterov", "outer_rate": 0.5, "delay": 1},
    {"apply": "reset", "residual_decay": 0.9, "every": 2},
    {"method": "exdyna", "delay": 1},
]


def _parts(settings, seed=0):
    model = Normed()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, attach(model, optimizer, density=0.05, **settings)


def _facts(model, optimizer, sync):
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    buffers = [buffer.float().flatten() for buffer in model.buffers()]
    return torch.cat([weights_of(model), shared_weights(sync, model), *map(torch.flatten, moments), *buffers])


def _resume(rank, workers, settings, gathered):
    model, optimizer, sync = _parts(settings)
    train(model, optimizer, range(4))
    state = sync.gathered_state_dict() if gathered else sync.state_dict()
    saved = copy.deepcopy(state)
    train(model, optimizer, range(4, 9))
    uninterrupted = _facts(model, optimizer, sync)

    model, optimizer, sync = _parts(settings)
    train(model, optimizer, range(20, 22))  # whatever was there before is forgotten
    sync.load_state_dict(saved)
    train(model, optimizer, range(4, 9))
    return uninterrupted, _facts(model, optimizer, sync)


@pytest.mark.parametrize(("settings", "gathered"), [*((each, False) for each in RULES), (RULES[2], True)], ids=str)
def test_resuming_equals_not_having_stopped_bit_for_bit(settings, gathered):
    """Weights, moments and running statistics; saving in between changes nothing either."""
    for uninterrupted, resumed in on_processes(2, _resume, settings, gathered):
        assert torch.equal(uninterrupted, resumed)


def _gather(rank, workers):
    model, optimizer, sync = _parts({"delay": 1})
    train(model, optimizer, range(4))
    return weights_of(model), shared_weights(sync, model), sync.gathered_state_dict()


def _spread(rank, workers, state):
    model, optimizer, sync = _parts({"delay": 1})
    sync.load_state_dict(state)
    found = weights_of(model), shared_weights(sync, model)
    train(model, optimizer, range(2))
    return found, shared_weights(sync, model)


def test_a_gathered_state_loads_with_another_number_of_workers():
    """Shared weights are what they were, and every rank begins at the mean of all own ones."""
    saved = on_processes(2, _gather)
    mean = torch.stack([own for own, _, _ in saved]).double().mean(0)
    ranks = on_processes(3, _spread, saved[0][2])
    for (own, shared), _ in ranks:
        assert torch.equal(shared, saved[0][1])
        torch.testing.assert_close(own.double(), mean, rtol=1e-6, atol=1e-7)
    assert all_equal(weights for _, weights in ranks)


def _damage(rank, workers):
    model, optimizer, sync = _parts({"delay": 1})
    train(model, optimizer, range(3))
    good, texts = sync.state_dict(), []

    def attempt(change):
        state = copy.deepcopy(good)
        change(state)
        before = _facts(model, optimizer, sync)
        try:
            sync.load_state_dict(state)
            texts.append("loaded")
        except spardl.StateError as error:
            texts.append(str(error))
        assert torch.equal(before, _facts(model, optimizer, sync)), "something was changed"

    landings = good["local"]["landings"]
    name = max(landings, key=lambda each: landings[each]["touched"].numel())
    landing = landings[name]
    attempt(lambda state: state.update(rank=1 - rank))
    attempt(lambda state: state.pop("local"))
    attempt(lambda state: state["local"]["own"].pop(name))
    attempt(lambda state: state["local"]["own"].update({name: torch.zeros(1)}))
    attempt(lambda state: state["local"]["shared"][name].fill_(torch.nan))
    attempt(lambda state: state["local"]["landings"][name].update(touched=torch.full_like(landing["touched"], 10**9)))
    attempt(lambda state: state["local"]["landings"][name].update(sent=landing["sent"] * torch.nan))
    attempt(lambda state: state["local"]["landings"][name].pop("sent"))
    attempt(lambda state: state["local"].update(steps=-1))
    attempt(lambda state: state["local"].update(optimizers=[]))
    attempt(lambda state: state["local"].update(scaler={"scale": -1.0}))
    return texts


def test_a_state_of_another_place_or_a_damaged_one_is_refused_and_nothing_is_changed():
    for texts in on_processes(2, _damage):
        assert len(texts) == 11 and all(text != "loaded" and text.endswith((".", "one.")) for text in texts), texts


def _reload(rank, workers):
    model = mlp()
    optimizer = sgd(model)
    sync = attach(model, optimizer, density=0.05, delay=1)
    train(model, optimizer, range(3))
    model.load_state_dict(mlp(seed=5).state_dict())
    loaded = shared_weights(sync, model)
    train(model, optimizer, range(3, 5))
    return torch.equal(loaded, weights_of(mlp(seed=5))), shared_weights(sync, model)


def test_weights_that_the_model_loads_are_the_shared_ones_from_then_on():
    """Not a difference that would have to be sent."""
    ranks = on_processes(2, _reload)
    assert all(same for same, _ in ranks) and all_equal(weights for _, weights in ranks)
