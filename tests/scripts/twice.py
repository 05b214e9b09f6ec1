"""A training script run twice: as its author wrote it, and with the one line of spardl.

A script is a function that takes `attach` and calls it where a user would write `spardl.attach(...)`. It runs on every
rank, in the same processes, first with `plain`, which does nothing, and then with spardl at density 1, where nothing
waits and so nothing may differ.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import spardl
from processes import on_processes
from training import all_equal

Attach = Callable[..., Any]
Script = Callable[[Attach], Tensor]

# Weights of these models lie around 0.2: this is some tens of roundings of float32.
ACCURACY: dict[str, float] = {"rtol": 1e-5, "atol": 3e-6}


def plain(*_: Any, **__: Any) -> None:
    """Where the line of spardl is left out."""


def attach_with(**settings: Any) -> Attach:
    """`spardl.attach` with these settings, and with a timeout that ends a test that hangs."""
    return lambda model, **given: spardl.attach(model, **{"timeout": 30, **settings, **given})


def assert_trains_like_plain_ddp(script: Script, *variants: dict[str, Any], workers: int = 2) -> None:
    """The script ends with the same weights with and without spardl, and with it all ranks hold the same bits.

    `variants` are settings besides density 1; without any, there is one with none.
    """
    ranks = on_processes(workers, _run, script, variants or ({},))
    for rank, (theirs, ours) in enumerate(ranks):
        assert theirs.isfinite().all(), "the script itself does not train"
        for settings, weights in ours.items():
            assert_close(weights, theirs, f"rank {rank}, {settings}")
    for settings in ranks[0][1]:
        assert all_equal(ours[settings] for _, ours in ranks), settings


def _run(
    rank: int, workers: int, script: Script, variants: tuple[dict[str, Any], ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    return script(plain), {str(settings): script(attach_with(density=1.0, **settings)) for settings in variants}


def assert_close(ours: Tensor, theirs: Tensor, where: str) -> None:
    """Equal to float32 accuracy."""
    torch.testing.assert_close(ours, theirs, **ACCURACY, msg=lambda text: f"{where}: {text}")


@contextmanager
def spardl_warnings() -> Iterator[list[str]]:
    """What spardl warns of in here, in order, every time; the list is filled when the block ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if issubclass(each.category, spardl.SparDLWarning)]


def error_of(run: Callable[[], object]) -> tuple[str, str]:
    """Name and text of the error of spardl that `run` ends with; two empty ones if it ends well."""
    try:
        run()
    except spardl.SparDLError as error:
        return type(error).__name__, str(error)
    return "", ""
