"""Small models and data sets with everything that makes resuming hard: dropout, BatchNorm, carried state, augmentation.

`use` puts them into the registries; processes that are forked afterwards have them too.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spardl.train.data import DATASETS
from spardl.train.dataset import DataSet
from spardl.train.models import MODELS
from spardl.train.recipes import Recipe
from spardl.train.settings import TrainSettings
from spardl.train.source import Batch, Examples, Stream
from spardl.train.tasks import Classification, LanguageModel

VOCABULARY = 12


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("noisy", "rhyme"):
        monkeypatch.setitem(DATASETS, name, f"fakes:{name}")
    for name in ("normed", "recurrent"):
        monkeypatch.setitem(MODELS, name, f"fakes:{name}")


def noisy(directory: Path | None = None) -> DataSet:
    """Points in ten dimensions in one of three classes; noise is added anew in every batch."""

    def shake(batch: Batch, generator: torch.Generator) -> Batch:
        inputs, labels = batch
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator), labels

    inputs = torch.randn(400, 10, generator=torch.Generator().manual_seed(3))
    labels = inputs[:, :3].argmax(dim=1)
    train, test = Examples(inputs[:320], labels[:320], augment=shake), Examples(inputs[320:], labels[320:])
    return DataSet("noisy", train, test, Classification(), facts={"classes": 3})


def normed(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 40),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(40, 40),
        nn.ReLU(),
        nn.Linear(40, classes),
    )


def rhyme(directory: Path | None = None, window: int = 6) -> DataSet:
    """A sequence in which each token follows from the one before, most of the time."""
    generator = torch.Generator().manual_seed(4)
    tokens = [0]
    for leap in (torch.rand(1500, generator=generator) < 0.2).tolist():
        after = int(torch.randint(VOCABULARY, (), generator=generator)) if leap else (5 * tokens[-1] + 3) % VOCABULARY
        tokens.append(after)
    line = torch.tensor(tokens)
    train, test = Stream(line[:1200], window), Stream(line[1200:], window)
    return DataSet("rhyme", train, test, LanguageModel(recurrent=True), facts={"vocabulary": VOCABULARY})


class Recurrent(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.head(self.dropout(hidden)), state


def recurrent(vocabulary: int) -> nn.Module:
    return Recurrent(vocabulary)


POINTS = Recipe("points", "", "", "normed", "noisy", TrainSettings(epochs=3, batch_size=8, lr=0.05, seed=1))
RHYMES = Recipe("rhymes", "", "", "recurrent", "rhyme", TrainSettings(epochs=2, batch_size=4, lr=0.5, seed=1))
