"""What a model is asked to do with a batch: the loss that trains it, and the figures that it is judged by.

Figures are kept as sums over examples until the end, so that shards of any size add up to what one process would find.
"""

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from spardl.train.source import IGNORED, Batch

Better = Literal["higher", "lower"]

BEST = 10  # an item among so many best is a hit
PAIRS = 1 << 17  # that are scored at once


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
    does not follow it (truncated backpropagation through time). Words are usually judged by perplexity, characters by
    the loss itself.
    """

    better: Better = "lower"
    sums = 3

    def __init__(self, *, recurrent: bool = False, metric: Literal["perplexity", "loss"] = "perplexity") -> None:
        self.recurrent = recurrent
        self.metric: str = metric

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


class Ranking:
    """Which item suits a user. The model scores pairs of users and items.

    To train, a batch is (users, items, labels): pairs that belong together, 1, or do not, 0. To measure, it is (users,
    candidates): for each user the item that suits, and then others; candidates of -100 do not count.
    """

    metric = "HR@10"
    better: Better = "higher"
    sums = 4

    def loss(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        users, items, labels = batch
        return binary_cross_entropy_with_logits(model(users, items).float(), labels.float()), None

    def measure(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        """A candidate is ahead of the right one unless it scores less: neither ties nor NaN make a hit by luck."""
        users, candidates = batch
        counted = candidates != IGNORED
        scores = _pair_scores(model, users, candidates, counted)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1
        losses = binary_cross_entropy_with_logits(scores, labels, reduction="none").where(counted, 0)
        ahead = (~(scores[:, 1:] < scores[:, :1]) & counted[:, 1:]).sum(dim=1)
        hit = ahead < BEST
        gains = torch.where(hit, 1 / torch.log2(ahead.double() + 2), 0)
        return _sums(len(users), (losses.sum(dim=1) / counted.sum(dim=1)).sum(), hit.sum(), gains.sum()), None

    def figures(self, sums: Tensor) -> dict[str, float]:
        count, loss, hits, gains = sums.tolist()
        return {"loss": _ratio(loss, count), "HR@10": _ratio(hits, count), "NDCG@10": _ratio(gains, count)}


def _pair_scores(model: nn.Module, users: Tensor, candidates: Tensor, counted: Tensor) -> Tensor:
    """Scores of users x candidates, 0 where they do not count; in parts, for there may be millions of pairs."""
    pairs = zip(
        users[:, None].expand_as(candidates)[counted].split(PAIRS), candidates[counted].split(PAIRS), strict=True
    )
    found = torch.cat([model(some, items).float() for some, items in pairs])
    return torch.zeros(candidates.shape, device=found.device).masked_scatter(counted, found)


def _sums(count: int, *values: Tensor) -> Tensor:
    return torch.tensor([count, *(value.item() for value in values)], dtype=torch.float64)


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
