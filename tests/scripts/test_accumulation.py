"""Several `backward()` before one `optimizer.step()`, without `no_sync`.

People write it because it is shorter, and because plain DDP does the right thing: what the first pass averaged is in
`grad` on every rank, the next pass adds to it, and averaging the sum leaves that part as it is. It only costs more
exchanges. Promised with spardl: the same step. Momentum and weight decay count once per step, not once per pass.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from scripts.twice import Attach, assert_trains_like_plain_ddp
from training import loss_of, mlp, weights_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"weight_decay": 0.05},
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.05},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
}
MOMENTUM = OPTIMIZERS["momentum"]

# The first pass leaves a velocity in `grad`, with decay in it, and the next one takes that for a gradient.


def accumulate(
    attach: Attach,
    sgd: dict[str, Any],
    passes: tuple[str, ...] = ("sync", "sync", "sync"),
    set_to_none: bool = True,
    as_view: bool = False,
) -> Tensor:
    """A step is some micro-batches, each of which DDP synchronises, or not, as `passes` says."""
    model = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_view)
    optimizer = SGD(model.parameters(), lr=0.1, **sgd)
    attach(model, optimizer=optimizer)
    for step in range(10):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part, kind in enumerate(passes):
            with model.no_sync() if kind == "no_sync" else nullcontext():
                loss = loss_of(model, dist.get_rank(), len(passes) * step + part)
                (loss / len(passes)).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulating_without_no_sync_is_what_plain_ddp_does(name: str) -> None:
    assert_trains_like_plain_ddp(partial(accumulate, sgd=OPTIMIZERS[name]))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_it_does_not_matter_where_gradients_lie_nor_how_they_are_cleared(as_view: bool, set_to_none: bool) -> None:
    """With `gradient_as_bucket_view` what the last pass delivered and what the next one adds to is one memory."""
    assert_trains_like_plain_ddp(partial(accumulate, sgd=MOMENTUM, as_view=as_view, set_to_none=set_to_none))


@pytest.mark.parametrize(
    "passes",
    [
        ("no_sync", "no_sync", "sync"),
        pytest.param(("no_sync", "sync", "sync")),
        pytest.param(("no_sync", "sync", "no_sync", "sync")),
        pytest.param(("sync", "no_sync", "no_sync", "sync")),
    ],
    ids="-".join,
)
def test_passes_under_no_sync_may_lie_between(passes: tuple[str, ...]) -> None:
    assert_trains_like_plain_ddp(partial(accumulate, sgd=MOMENTUM, passes=passes))


def test_groups_that_start_during_backward_accumulate_as_well() -> None:
    assert_trains_like_plain_ddp(partial(accumulate, sgd=MOMENTUM), {"groups": 1000})
