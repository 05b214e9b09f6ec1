"""Neural matrix factorisation: how likely a user is to like an item.

He et al., "Neural collaborative filtering", 2017. Two models share the last layer: a product of embeddings (matrix
factorisation) and a perceptron over embeddings of their own.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def neumf(users: int, items: int) -> nn.Module:
    """The size that MLPerf trained on MovieLens-20M: 31,832,577 parameters with 138,493 users and 26,744 items."""
    return NeuMF(users, items, factors=64, widths=(256, 256, 128, 64), dropout=0.5)


def neumf_small(users: int, items: int) -> nn.Module:
    """For MovieLens-100K or -1M: 40 parameters for each user and item, and 2,761 besides."""
    return NeuMF(users, items, factors=8, widths=(64, 32, 16, 8), dropout=0.0)


class NeuMF(nn.Module):
    """`factors` is the size of the factorisation; `widths` are the perceptron's, of which embeddings fill the first."""

    def __init__(self, users: int, items: int, *, factors: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.factors_of_users = nn.Embedding(users, factors)
        self.factors_of_items = nn.Embedding(items, factors)
        self.users = nn.Embedding(users, widths[0] // 2)
        self.items = nn.Embedding(items, widths[0] // 2)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.perceptron = nn.Sequential(*layers)
        self.head = nn.Linear(factors + widths[-1], 1)
        self._initialise()

    def _initialise(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=0.01)
            elif isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """A logit for each pair; users and items are numbers of any common shape."""
        product = self.factors_of_users(users) * self.factors_of_items(items)
        perceived = self.perceptron(torch.cat([self.users(users), self.items(items)], dim=-1))
        logits: Tensor = self.head(torch.cat([product, perceived], dim=-1))
        return logits.squeeze(-1)
