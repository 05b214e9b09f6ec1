"""The delta of a selection: 1 is chance, 0 is nothing left."""

import math

import pytest
import torch

from spardl.sync.diagnosis import delta


def of(vector, kept, count):
    """The delta where `kept` was sent of `vector`."""
    positions = kept.nonzero().flatten()
    return delta(vector.clone(), positions, kept[positions], count)


def random_choice(vector, count, generator):
    kept = torch.zeros_like(vector)
    chosen = torch.randperm(len(vector), generator=generator)[:count]
    kept[chosen] = vector[chosen]
    return kept


def test_the_closed_form_is_the_mean_of_random_choices():
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(200, generator=generator) ** 3
    deltas = [of(vector, random_choice(vector, 20, generator), 20) for _ in range(2000)]
    assert sum(deltas) / len(deltas) == pytest.approx(1.0, abs=0.02)


def test_the_largest_entries_leave_less_than_chance():
    """Each rank's own largest entries, summed: below 1, as the convergence proof assumes."""
    generator = torch.Generator().manual_seed(1)
    ranks = [torch.randn(1000, generator=generator) ** 3 for _ in range(4)]
    sent = torch.zeros(1000)
    for rank in ranks:
        chosen = rank.abs().topk(50).indices
        sent[chosen] += rank[chosen]
    assert 0 < of(sum(ranks), sent, 50) < 0.9


def test_delta_at_its_ends():
    vector = torch.tensor([3.0, -4.0])
    assert of(vector, vector, 2) == 0.0
    assert of(vector, torch.zeros(2), 1) == 2.0
    assert of(vector, torch.zeros(2), 2) == math.inf
    assert of(torch.zeros(2), torch.zeros(2), 1) == 0.0
