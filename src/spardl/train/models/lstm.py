"""Recurrent networks: a classifier of texts, and language models.

Hochreiter and Schmidhuber, "Long short-term memory", 1997. The language models follow Zaremba et al., "Recurrent
neural network regularization", 2014: dropout between layers only, all weights uniform in +-`spread`.
"""

from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pack_padded_sequence

State = tuple[Tensor, Tensor]


def lstm_imdb(vocabulary: int, classes: int) -> nn.Module:
    """For reviews: 2,561,052 parameters with a vocabulary of 50,001 and 2 classes."""
    return TextClassifier(vocabulary, classes, embedded=50, width=100)


def lstm_ptb(vocabulary: int) -> nn.Module:
    """For Penn Treebank, 2 x 1,500 (the paper's large model): 66,034,000 parameters with a vocabulary of 10,000."""
    return LstmLanguageModel(vocabulary, width=1500, layers=2, dropout=0.65, tied=False, spread=0.04)


def lstm_wikitext2(vocabulary: int) -> nn.Module:
    """For WikiText-2, 3 x 650, tied: 31,819,578 parameters with a vocabulary of 33,278; 28,949,319 with 28,869."""
    return LstmLanguageModel(vocabulary, width=650, layers=3, dropout=0.4, tied=True, spread=0.05)


def lstm_small(vocabulary: int) -> nn.Module:
    """To try things out, 2 x 200, tied: 2,653,200 parameters with a vocabulary of 10,000."""
    return LstmLanguageModel(vocabulary, width=200, layers=2, dropout=0.2, tied=True, spread=0.1)


class TextClassifier(nn.Module):
    """Reads a text and scores the classes by the state after its last token."""

    def __init__(self, vocabulary: int, classes: int, *, embedded: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedded)
        self.lstm = nn.LSTM(embedded, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Scores (texts x classes) for tokens (texts x longest); what comes after a text's length is not read."""
        lengths = lengths.cpu().clamp(min=1)
        texts = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(texts)
        scores: Tensor = self.head(hidden[-1])
        return scores


class LstmLanguageModel(nn.Module):
    """Scores for the next token at every place. `tied` models use the embedding for the scores as well."""

    def __init__(self, vocabulary: int, *, width: int, layers: int, dropout: float, tied: bool, spread: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, dropout=dropout, batch_first=True)
        self.head = None if tied else nn.Linear(width, vocabulary)
        self.bias = nn.Parameter(self.embedding.weight.new_zeros(vocabulary)) if tied else None
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -spread, spread)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Scores (batch x time x vocabulary) and the state to go on with, as nn.LSTM has it."""
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        outputs = self.dropout(outputs)
        scores: Tensor
        if self.head is None:
            scores = linear(outputs, self.embedding.weight, self.bias)
        else:
            scores = self.head(outputs)
        return scores, state
