"""The factor that `outer_rate="auto"` comes to under the settings in force."""

import torch
from torch.optim import SGD, AdamW

from spardl.config import SyncConfig
from spardl.integrations.outer import outer_rate
from spardl.update import LocalUpdates

WEIGHTS = [torch.nn.Parameter(torch.zeros(1))]


def test_a_mean_of_everything_is_taken_as_it_is_whatever_density_stands_beside_the_method():
    for optimizer in (AdamW(WEIGHTS), SGD(WEIGHTS, lr=0.1)):
        assert outer_rate(LocalUpdates(), SyncConfig(method="dense"), 4, [optimizer]) == 1.0
        assert outer_rate(LocalUpdates(), SyncConfig(density=0.01), 4, [optimizer]) > 1.0
