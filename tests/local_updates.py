"""What tests of local updates have in common."""

import torch
from torch import nn

import spardl
from training import weights_of

LOCAL = {"update": "local", "dense_below": 0, "timeout": 30}


def attach(model, optimizer, **settings):
    return spardl.attach(model, optimizer=optimizer, **{**LOCAL, **settings})


def shared_weights(sync, model):
    with sync.shared():
        return weights_of(model).clone()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)

    def forward(self, inputs):
        return self.last(torch.relu(self.norm(self.first(inputs))))
