"""BERT with its masked-language-model head.

Devlin et al., "BERT: Pre-training of deep bidirectional transformers for language understanding", 2018. Only the
masked tokens are learned, not which sentence follows which; windows are full, so there is no padding to leave out.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from spardl.train.models.transformer import Block, Embeddings, initialise

EPS = 1e-12


def bert_base(vocabulary: int, positions: int = 512) -> nn.Module:
    """12 layers of 768: 109,514,298 parameters with a vocabulary of 30,522."""
    return Bert(vocabulary, positions, width=768, layers=12, heads=12)


def bert_large(vocabulary: int, positions: int = 512) -> nn.Module:
    """24 layers of 1,024: 335,174,458 parameters with a vocabulary of 30,522."""
    return Bert(vocabulary, positions, width=1024, layers=24, heads=16)


def bert_small(vocabulary: int, positions: int = 512) -> nn.Module:
    """4 layers of 256: 11,201,594 parameters with a vocabulary of 30,522."""
    return Bert(vocabulary, positions, width=256, layers=4, heads=4)


def bert_tiny(vocabulary: int, positions: int = 512) -> nn.Module:
    """2 layers of 128: 4,416,698 parameters with a vocabulary of 30,522."""
    return Bert(vocabulary, positions, width=128, layers=2, heads=2)


class Bert(nn.Module):
    """Scores for every place from all places around it. The embedding of tokens also makes the scores."""

    def __init__(
        self, vocabulary: int, positions: int, *, width: int, layers: int, heads: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, width)
        self.segments = nn.Embedding(2, width)  # of the original's two sentences; here all is the first
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, norm_first=False, causal=False, dropout=dropout, eps=EPS) for _ in range(layers))
        )
        self.head = nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(width, eps=EPS)
        self.head_bias = nn.Parameter(self.head.bias.new_zeros(vocabulary))
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch x time x vocabulary) for tokens (batch x time)."""
        embedded = self.dropout(self.norm(self.embeddings(tokens) + self.segments.weight[0]))
        outputs = self.head_norm(gelu(self.head(self.blocks(embedded))))
        return linear(outputs, self.embeddings.tokens.weight, self.head_bias)
