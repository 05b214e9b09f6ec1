"""Momentum of entries that were sent starts anew; all other momentum stays."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from local_updates import attach
from processes import on_processes
from spardl.integrations.inertia import Inertia
from spardl.integrations.replica import Replica
from spardl.sync.landing import Landing
from spardl.update import LocalUpdates
from training import mlp, sgd, train


def stepped(weights, optimizer_of):
    """A parameter that has come this far from zero, and the optimizer that has stepped it once."""
    parameter = nn.Parameter(torch.zeros_like(weights))
    replica = Replica(parameter)
    optimizer = optimizer_of([parameter])
    parameter.grad = -weights
    optimizer.step()
    with torch.no_grad():
        parameter.copy_(weights)
    return parameter, replica, optimizer


def momentum_sgd(parameters):
    return SGD(parameters, lr=0.1, momentum=0.9)


def land(parameter, replica, optimizer, landing, **rule):
    """The momentum that is left when this landing comes."""
    Inertia(LocalUpdates(**rule), [optimizer]).restart({"": landing}, {"": replica})
    state = optimizer.state[parameter]
    return state.get("momentum_buffer", state.get("exp_avg"))


def sent(positions, values):
    where, what = torch.tensor(positions), torch.tensor(values)
    return Landing(where, what, where, what)


WEIGHTS = torch.tensor([1.0, -2.0, 3.0, -4.0])


def test_momentum_is_gone_where_a_difference_was_sent_and_nowhere_else():
    """Shared weights are zero here, so that a difference is minus the weight."""
    left = land(*stepped(WEIGHTS, momentum_sgd), sent([1, 2], [2.0, -3.0]))
    assert left.tolist() == [-1.0, 0.0, 0.0, 4.0]


def test_a_rounding_error_that_stays_behind_does_not_keep_momentum():
    left = land(*stepped(WEIGHTS, momentum_sgd), sent([1, 2], [1.75, -3.5]))
    assert left.tolist() == [-1.0, 0.0, 0.0, 4.0]


def test_where_this_rank_keeps_what_others_have_dropped_momentum_stays():
    """Position 1 was not sent: a neighbour's 0.5 was given here to be kept, so that more waits than before."""
    left = land(*stepped(WEIGHTS, momentum_sgd), sent([1], [-0.5]))
    assert left.tolist() == [-1.0, 2.0, -3.0, 4.0]


def test_a_tensor_that_was_sent_whole_keeps_its_momentum():
    left = land(*stepped(WEIGHTS, momentum_sgd), Landing(None, WEIGHTS, None, -WEIGHTS))
    assert left.tolist() == [-1.0, 2.0, -3.0, 4.0]


@pytest.mark.parametrize(
    ("optimizer_of", "rule", "restarts"),
    [
        (momentum_sgd, "auto", True),
        (momentum_sgd, "kept", False),
        (AdamW, "auto", False),
        (AdamW, "restarted", True),
    ],
)
def test_by_itself_only_sgd_starts_anew(optimizer_of, rule, restarts):
    left = land(*stepped(WEIGHTS, optimizer_of), sent([1], [2.0]), sent_momentum=rule)
    assert (left[1].item() == 0.0) is restarts
    assert left[0] != 0.0 and left[2] != 0.0


@pytest.mark.parametrize("of_parameter", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("of_gradient", [torch.channels_last, torch.contiguous_format])
def test_positions_are_those_of_the_parameter_however_its_momentum_lies_in_memory(of_parameter, of_gradient):
    weights = torch.arange(1.0, 25.0).view(2, 3, 2, 2).to(memory_format=of_parameter)
    parameter, replica, optimizer = stepped(weights, momentum_sgd)
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(2, 3, 2, 2).to(memory_format=of_gradient)
    flat = weights.as_strided((24,), (1,))
    left = land(parameter, replica, optimizer, sent([4, 9], (-flat[[4, 9]]).tolist()))
    gone = weights[left == 0]
    assert sorted(gone.tolist()) == sorted(flat[[4, 9]].tolist())


def test_before_the_first_step_and_without_momentum_there_is_nothing_to_lose():
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = SGD([parameter], lr=0.1)
    Inertia(LocalUpdates(), [optimizer]).restart({"": sent([1], [2.0])}, {"": Replica(parameter)})
    assert not optimizer.state[parameter]


def _without_momentum(rank, workers, delay, sent_momentum):
    """How many entries of a model have none after four exchanges."""
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    sync = attach(model, optimizer, density=0.05, delay=delay, sent_momentum=sent_momentum)
    train(model, optimizer, range(4))
    found = sum(int((optimizer.state[each]["momentum_buffer"] == 0).sum()) for each in model.parameters())
    sync.detach()
    return found


@pytest.mark.parametrize("delay", [0, 1])
def test_after_an_exchange_about_as_many_entries_as_were_sent_have_no_momentum(delay):
    """Of 2,225 entries each of two ranks sends about 110, and some more when it sums up a block."""
    kept, restarted = (max(on_processes(2, _without_momentum, delay, rule)) for rule in ("kept", "auto"))
    assert 50 < restarted - kept < 700
