"""What BERT and GPT share: embeddings with positions, and blocks of self-attention and perceptron.

Vaswani et al., "Attention is all you need", 2017.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from spardl.errors import ConfigError


class Embeddings(nn.Module):
    """Learned vectors for tokens and for their places, added up."""

    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)

    def forward(self, tokens: Tensor) -> Tensor:
        length, most = tokens.shape[1], self.positions.num_embeddings
        if length > most:
            raise ConfigError(
                f"a window of {length} tokens exceeds this model's {most} positions; use a shorter window."
            )
        vectors: Tensor = self.tokens(tokens)
        return vectors + self.positions.weight[:length]


class SelfAttention(nn.Module):
    """Every place looks at all places; a causal one only at itself and those before it."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        projected = self.project(inputs).unflatten(-1, (3, self.heads, -1))  # batch, time, 3, heads, width / heads
        queries, keys, values = projected.permute(2, 0, 3, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=self.causal)
        merged: Tensor = self.merge(mixed.transpose(1, 2).flatten(2))
        return merged


class Perceptron(nn.Module):
    """Four times as wide inside."""

    def __init__(self, width: int, gelu: Literal["none", "tanh"]) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.activate = nn.GELU(approximate=gelu)
        self.merge = nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.merge(self.activate(self.widen(inputs)))
        return outputs


class Block(nn.Module):
    """Attention, then perceptron, each added to its input.

    `norm_first` normalises what goes into each of the two (GPT-2); otherwise the sums are normalised (BERT).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm_first: bool,
        causal: bool,
        dropout: float,
        gelu: Literal["none", "tanh"] = "none",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = SelfAttention(width, heads, causal=causal, dropout=dropout)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.perceptron = Perceptron(width, gelu)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.norm_first:
            middle = inputs + self.dropout(self.attention(self.norm1(inputs)))
            outputs: Tensor = middle + self.dropout(self.perceptron(self.norm2(middle)))
            return outputs
        middle = self.norm1(inputs + self.dropout(self.attention(inputs)))
        outputs = self.norm2(middle + self.dropout(self.perceptron(middle)))
        return outputs


def initialise(model: nn.Module, std: float = 0.02) -> None:
    """Weights normal with this deviation, biases zero: as BERT and GPT-2 begin."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=std)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
