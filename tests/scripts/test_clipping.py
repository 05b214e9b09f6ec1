"""`clip_grad_norm_` between backward and step.

Everybody has that line. Where momentum is local, what backward delivers is a velocity and not a gradient: clipping that
is another rule, which throws a part of momentum away. So there is `clip_norm=`, which bounds each worker's gradient
before momentum; on one worker it is what `clip_grad_norm_` is. Promised: one warning that names it where the line only
trains differently, and none where there is no momentum to move, since then the line does what it always did.
"""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from processes import on_processes
from scripts.twice import (
    Attach,
    assert_close,
    assert_trains_like_plain_ddp,
    attach_with,
    plain,
    spardl_warnings,
)
from training import loss_of, mlp, weights_of


def clip(attach: Attach, norm: float | None, **sgd: Any) -> Tensor:
    model = DistributedDataParallel(mlp())
    optimizer = SGD(model.parameters(), lr=0.1, **sgd)
    attach(model, optimizer=optimizer)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        if norm is not None:
            clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return weights_of(model)


def test_clipping_without_momentum_is_what_plain_ddp_does() -> None:
    """The norm of these gradients is between 0.5 and 1, so each of them is clipped."""
    assert_trains_like_plain_ddp(partial(clip, norm=0.3))


def warned_of(rank: int, workers: int, density: float, norm: float, momentum: float) -> list[str]:
    with spardl_warnings() as texts:
        clip(attach_with(density=density), norm, momentum=momentum)
    return texts


@pytest.mark.parametrize("density", [1.0, 0.1])
def test_clipping_what_has_been_through_momentum_is_warned_of_once(density: float) -> None:
    for texts in on_processes(2, warned_of, density, 0.05, 0.9):
        assert len(texts) == 1
        assert "clip_norm" in texts[0]


@pytest.mark.parametrize(("norm", "momentum"), [(1e6, 0.9), (0.05, 0.0)])
def test_a_norm_that_is_never_reached_or_gradients_without_momentum_are_no_reason_to_warn(
    norm: float, momentum: float
) -> None:
    assert on_processes(2, warned_of, 1.0, norm, momentum) == [[], []]


def clip_before_momentum(rank: int, workers: int, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Plain with the line, plain without it, and spardl without the line but with its own."""
    sgd = {"momentum": 0.9, "weight_decay": 0.01}
    ours = attach_with(density=1.0, clip_norm=0.3, **settings)
    return clip(plain, 0.3, **sgd), clip(plain, None, **sgd), clip(ours, None, **sgd)


@pytest.mark.parametrize("settings", [{}, {"groups": 1000}, {"groups": 100}], ids=str)
def test_on_one_worker_clip_norm_is_clip_grad_norm(settings: dict[str, Any]) -> None:
    """The norm is that of the whole gradient, in however many groups it is synchronised."""
    ((clipped, unclipped, ours),) = on_processes(1, clip_before_momentum, settings)
    assert (clipped - unclipped).abs().max() > 0.01
    assert_close(ours, clipped, "one worker")
