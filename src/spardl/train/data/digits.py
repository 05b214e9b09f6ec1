"""Handwritten digits that come with scikit-learn: nothing to download."""

from pathlib import Path

import torch

from spardl.train.dataset import DataSet
from spardl.train.source import Examples
from spardl.train.tasks import Classification

# The same split in every run: --seed changes the training, not what it is judged by.
SPLIT_SEED = 20240513
TEST_SHARE = 5


def digits(directory: Path | None = None) -> DataSet:
    """1,797 images of 8 x 8 pixels; one in five is kept for the test."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    cut = len(labels) // TEST_SHARE
    train, test = order[cut:], order[:cut]
    return DataSet(
        name="digits",
        train=Examples(inputs[train], labels[train]),
        test=Examples(inputs[test], labels[test]),
        task=Classification(),
        facts={"classes": 10, "channels": 1},
    )
