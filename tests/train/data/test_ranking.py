"""How a ranking is judged."""

import math

import pytest
import torch
from torch import Tensor, nn

from spardl.train.source import IGNORED
from spardl.train.tasks import Ranking


class Table(nn.Module):
    """Scores that a test chose: users x items."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.scores[users, items]


def measured(scores: Tensor, candidates: Tensor) -> dict[str, float]:
    task = Ranking()
    sums, carried = task.measure(Table(scores), (torch.arange(len(candidates)), candidates), None)
    assert carried is None and sums.dtype == torch.float64 and len(sums) == task.sums
    return task.figures(sums)


@pytest.mark.parametrize("rank", [1, 2, 10, 11, 100])
def test_an_item_among_the_ten_best_is_a_hit(rank: int) -> None:
    """And gains more, the higher it stands: 1 / log2(rank + 1)."""
    scores = torch.zeros(1, 100)
    scores[0, 1:rank] = 1.0
    scores[0, rank:] = -1.0
    figures = measured(scores, torch.arange(100)[None])
    assert figures["HR@10"] == (rank <= 10)
    assert figures["NDCG@10"] == pytest.approx(1 / math.log2(rank + 1) if rank <= 10 else 0)


@pytest.mark.parametrize("score", [0.0, math.nan, math.inf, -math.inf])
def test_a_model_that_scores_all_alike_hits_nothing(score: float) -> None:
    """A tie is no hit, and neither is a number that is none."""
    figures = measured(torch.full((3, 100), score), torch.arange(100).expand(3, 100))
    assert figures["HR@10"] == figures["NDCG@10"] == 0


def test_candidates_that_do_not_count_change_nothing() -> None:
    """Users may have fewer; loss and rank are over theirs."""
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    narrow = torch.arange(50).expand(2, 50)[:, :20]
    wide = torch.cat([narrow, torch.full((2, 9), IGNORED)], dim=1)
    assert measured(scores, wide) == pytest.approx(measured(scores, narrow))


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    """However the users are dealt to ranks."""
    model = Table(torch.randn(9, 40, generator=torch.Generator().manual_seed(1)))
    users, candidates, task = torch.arange(9), torch.arange(40).expand(9, 40), Ranking()
    whole, _ = task.measure(model, (users, candidates), None)
    parts = [task.measure(model, (users[part], candidates[part]), None)[0] for part in (slice(4), slice(4, 9))]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert whole[0] == 9


def test_the_loss_is_the_binary_cross_entropy_of_pairs() -> None:
    """Zero scores are a coin toss; the gradient pulls the right pair up and the wrong one down."""
    model = Table(torch.zeros(2, 3))
    batch = (torch.tensor([0, 1]), torch.tensor([2, 1]), torch.tensor([1.0, 0.0]))
    loss, _ = Ranking().loss(model, batch, None)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert model.scores.grad is not None
    assert model.scores.grad[0, 2] < 0 < model.scores.grad[1, 1]
