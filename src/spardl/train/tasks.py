"""What a model is asked to do with a batch: the loss that trains it, and the figures that it is judged by.

Figures are kept as sums over examples until the end, so that shards of any size add up to what one process would find.
"""

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spardl.train.source import IGNORED, Batch

Better = Literal["higher", "lower"]


class Task(Protocol):
    """`metric` names the figure that counts most, and `better` its good direction.

    `carried` is what a model keeps between consecutive batches of a stream; None at the start, and for most models.
    """

    metric: str
    better: Better
    sums: int  # how many `measure` returns

    def loss(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        """The batch's mean loss, to differentiate."""
        ...

    def measure(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        """Sums over the batch, as float64; those of all batches and ranks are added up. The first is a count."""
        ...

    def figures(self, sums: Tensor) -> dict[str, float]:
        """`loss`, the metric and others by name, from the sums over everything; NaN where there was nothing."""
        ...


class Classification:
    """One label per example. A batch is (inputs..., labels)."""

    metric = "accuracy"
    better: Better = "higher"
    sums = 3

    def loss(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        *inputs, labels = batch
        return cross_entropy(model(*inputs).float(), labels), None

    def measure(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        *inputs, labels = batch
        scores = model(*inputs).float()
        loss = cross_entropy(scores, labels, reduction="sum")
        correct = (scores.argmax(dim=1) == labels).sum()
        return _sums(len(labels), loss, correct), None

    def figures(self, sums: Tensor) -> dict[str, float]:
        count, loss, correct = sums.tolist()
        return {"loss": _ratio(loss, count), "accuracy": _ratio(correct, count)}


class LanguageModel:
    """The next token, or those under a mask. A batch is (tokens, targets); targets of -100 do not count.

    A recurrent model takes and returns a state beside the tokens, which is carried from batch to batch; the gradient
    does not follow it (truncated backpropagation through time).
    """

    metric = "perplexity"
    better: Better = "lower"
    sums = 3

    def __init__(self, *, recurrent: bool = False) -> None:
        self.recurrent = recurrent

    def loss(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        tokens, targets = batch
        scores, carried = self._scores(model, tokens, carried)
        return cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED), carried

    def measure(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        tokens, targets = batch
        scores, carried = self._scores(model, tokens, carried)
        flat, wanted = scores.flatten(0, 1).float(), targets.flatten()
        loss = cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
        correct = (flat.argmax(dim=1) == wanted).sum()
        return _sums(int((wanted != IGNORED).sum()), loss, correct), carried

    def _scores(self, model: nn.Module, tokens: Tensor, carried: Any) -> tuple[Tensor, Any]:
        if not self.recurrent:
            return model(tokens), None
        scores, state = model(tokens, carried)
        return scores, tuple(part.detach() for part in state)

    def figures(self, sums: Tensor) -> dict[str, float]:
        count, loss, correct = sums.tolist()
        mean = _ratio(loss, count)
        return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "accuracy": _ratio(correct, count)}


def _sums(count: int, *values: Tensor) -> Tensor:
    return torch.tensor([count, *(value.item() for value in values)], dtype=torch.float64)


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
