"""The factor that `outer_rate="auto"` comes to: of the exchange at hand, whatever comes later."""

import pytest
import torch
from torch.optim import SGD, AdamW

from spardl.integrations.outer import Outer
from spardl.kernels import for_device
from spardl.sync.landing import Landing
from spardl.update import LocalUpdates

WEIGHTS = [torch.nn.Parameter(torch.zeros(1))]
FIRST = torch.zeros(1, dtype=torch.int64)
ONE = torch.ones(1)
SPARSE, WHOLE = Landing(FIRST, ONE, FIRST, ONE), Landing(None, ONE, None, ONE)


def steps(optimizer, density, **rule):
    """What a mean of one becomes: of an entry that some have sent, and of a tensor that all have sent whole."""
    outer = Outer(LocalUpdates(**rule), for_device(torch.device("cpu")), [optimizer])
    outer.expect(density, 4)
    return outer.step("", SPARSE).item(), outer.step("", WHOLE).item()


@pytest.mark.parametrize("optimizer", [AdamW(WEIGHTS), SGD(WEIGHTS, lr=0.1)], ids=["AdamW", "SGD"])
def test_the_fewer_entries_are_sent_the_more_counts_each_and_what_is_sent_whole_counts_as_it_is(optimizer):
    found = [steps(optimizer, density) for density in (1.0, 0.25, 0.05, 0.01)]
    assert [whole for _, whole in found] == [1.0] * 4
    assert found[0][0] == 1.0 and sorted(sparse for sparse, _ in found) == [sparse for sparse, _ in found]
    assert found[3][0] > found[1][0] > 1.0


def test_sgd_counts_as_adam_does_where_its_momentum_starts_anew_and_less_where_it_goes_on():
    with_momentum, without = SGD(WEIGHTS, lr=0.1, momentum=0.9), SGD(WEIGHTS, lr=0.1)
    as_adam = steps(AdamW(WEIGHTS), 0.01)
    assert steps(with_momentum, 0.01) == as_adam == (pytest.approx(4**0.8), 1.0)
    for optimizer, rule in ((with_momentum, "kept"), (without, "auto"), (without, "restarted")):
        assert steps(optimizer, 0.01, sent_momentum=rule) == (2.0, 1.0)


def test_a_factor_that_is_given_is_taken_everywhere():
    assert steps(AdamW(WEIGHTS), 0.01, outer_rate=0.5) == (0.5, 0.5)
