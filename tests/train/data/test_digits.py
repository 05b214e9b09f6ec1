"""The embedded digits."""

import torch

from spardl.train.data.digits import digits


def test_digits_come_with_the_installation() -> None:
    """1,797 images of 8 x 8 with values in [0, 1]; test and training do not overlap, and the split never changes."""
    data = digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    inputs, _ = data.train.columns
    assert inputs.shape[1:] == (1, 8, 8)
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    labels = data.test.columns[1]
    assert torch.equal(labels, digits().test.columns[1])
    assert set(labels.tolist()) == set(range(10))
