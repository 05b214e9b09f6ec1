"""The optimizer is the one that was asked for."""

import pytest
from torch import nn
from torch.optim import SGD, Adam, AdamW

from spardl.train.optimizer import build_optimizer, set_rate
from spardl.train.settings import TrainSettings


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize(("name", "kind"), [("sgd", SGD), ("adam", Adam), ("adamw", AdamW)])
def test_the_name_decides(name: str, kind: type) -> None:
    """Adam and AdamW are two things."""
    settings = TrainSettings(epochs=1, batch_size=1, lr=0.1, optimizer=name, betas=(0.25, 0.5))  # type: ignore[arg-type]
    optimizer = build_optimizer(model(), settings)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0].get("betas", (0.25, 0.5)) == (0.25, 0.5)


def test_biases_and_norms_do_not_decay_under_adamw() -> None:
    """Two matrices do; four vectors are a group of their own."""
    network = model()
    optimizer = build_optimizer(
        network, TrainSettings(epochs=1, batch_size=1, lr=0.1, optimizer="adamw", weight_decay=0.1)
    )
    decaying, others = optimizer.param_groups
    assert {tuple(each.shape) for each in decaying["params"]} == {(4, 3), (2, 4)}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(others["params"]) == len(list(network.parameters()))


def test_the_rate_is_set_everywhere() -> None:
    """All groups learn alike."""
    optimizer = build_optimizer(model(), TrainSettings(epochs=1, batch_size=1, lr=0.1, decay="matrices"))
    set_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
