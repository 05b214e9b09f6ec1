"""Which optimizers step a model, what of them moves before the selection, and what cannot."""

import warnings
from collections.abc import Sequence
from typing import Literal

from torch.optim import SGD, Optimizer

from spardl.errors import ConfigError, SparDLWarning

Given = Optimizer | Sequence[Optimizer] | Literal[False] | None


def optimizers_of(given: object) -> list[Optimizer]:
    """The optimizers that were given, without what other libraries have wrapped round them.

    Raises:
        ConfigError: one of them is no torch optimizer.
    """
    if given is None or given is False:
        return []
    found = []
    for each in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer={type(each).__name__} is not a torch optimizer; pass the one that steps this model, a list"
                " of them, or False."
            )
        found.append(_unwrap(each))
    return found


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """Accelerate and Lightning keep the optimizer that they wrap as `.optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer) and inner is not optimizer:
        optimizer = inner
        inner = getattr(optimizer, "optimizer", None)
    return optimizer


INSTEAD = 'With update="local" every rank steps its own optimizer, whatever it is, and nothing of it is lost.'


def warn_of_losses(optimizers: Sequence[Optimizer], *, stacklevel: int, instead: str = INSTEAD) -> None:
    """Say which of them act behind the selection, what is lost there, and what to do instead."""
    for each in optimizers:
        if not isinstance(each, SGD):
            warnings.warn(
                f"{type(each).__name__} keeps its moments behind the selection: entries that waited arrive as one value"
                f" that looks like noise to it, and training lags behind dense. {instead}",
                SparDLWarning,
                stacklevel=stacklevel,
            )


def has_memory(optimizer: Optimizer) -> bool:
    """Whether an optimizer has momentum or moments that would act behind the selection."""
    if isinstance(optimizer, SGD):
        return any(group["momentum"] or group["weight_decay"] for group in optimizer.param_groups)
    return True
