"""GPT-2: a causal language model of normalise-first transformer blocks.

Radford et al., "Language models are unsupervised multitask learners", 2019.
"""

import math

from torch import Tensor, nn
from torch.nn.functional import linear

from spardl.train.models.transformer import Block, Embeddings, initialise


def gpt_small(vocabulary: int, positions: int = 1024) -> nn.Module:
    """12 layers of 768, the smallest GPT-2: 124,439,808 parameters with a vocabulary of 50,257."""
    return Gpt(vocabulary, positions, width=768, layers=12, heads=12)


def gpt_mini(vocabulary: int, positions: int = 256) -> nn.Module:
    """4 layers of 128: 2,106,112 parameters with a vocabulary of 10,000."""
    return Gpt(vocabulary, positions, width=128, layers=4, heads=4)


def gpt_nano(vocabulary: int, positions: int = 64) -> nn.Module:
    """4 layers of 128 for characters, without dropout: 809,856 parameters with a vocabulary of 65."""
    return Gpt(vocabulary, positions, width=128, layers=4, heads=4, dropout=0.0)


def gpt_10m(vocabulary: int, positions: int = 256) -> nn.Module:
    """6 layers of 384 for characters: 10,770,816 parameters with a vocabulary of 65."""
    return Gpt(vocabulary, positions, width=384, layers=6, heads=6, dropout=0.2)


class Gpt(nn.Module):
    """Scores for the next token at every place. The embedding of tokens also makes the scores."""

    def __init__(
        self, vocabulary: int, positions: int, *, width: int, layers: int, heads: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [
            Block(width, heads, norm_first=True, causal=True, dropout=dropout, gelu="tanh") for _ in range(layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        initialise(self)
        # Each block adds twice to the same sum: smaller parts, so that it does not grow with depth.
        for block in blocks:
            for last in (block.attention.merge, block.perceptron.merge):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch x time x vocabulary) for tokens (batch x time)."""
        outputs = self.norm(self.blocks(self.dropout(self.embeddings(tokens))))
        return linear(outputs, self.embeddings.tokens.weight)
