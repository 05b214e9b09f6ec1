"""A tree of plain values, altered in one place: what a damaged or crafted file may hold."""

import copy
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Whatever may stand where something else did.
ODD = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -1.0, 1e20, 1e39, 1e308, math.nan, math.inf,
    -math.inf, "", "x", b"\0", [], {}, [[]], [None], {"x": 1}, (1, 2),
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the tree, as a path of keys."""
    yield path
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from places(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree[:8]):
            yield from places(value, (*path, position))


def mutated(tree: Any, chance: random.Random) -> Any:
    """A copy that differs in one place."""
    tree = copy.deepcopy(tree)
    path = chance.choice(list(places(tree))[1:])
    *above, key = path
    parent = tree
    for each in above:
        parent = parent[each]
    if isinstance(parent, tuple):
        return tree
    how = chance.randrange(4)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[chance.choice(["x", 7, None, f"{key}x"])] = parent.pop(key)
    else:
        parent[key] = _odd(parent[key], chance)
    return tree


def _odd(value: Any, chance: random.Random) -> Any:
    if isinstance(value, Tensor):
        return _odd_tensor(value, chance)
    if isinstance(value, list) and value and chance.random() < 0.5:
        return chance.choice([value[:-1], value[::-1], [*value, value[-1]], [*value, None], [value]])
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return chance.choice([value + 1, -value - 1, value * 1000, float(value), str(value)])
    if isinstance(value, float) and chance.random() < 0.5:
        return chance.choice([-value, value * 1e30, value * 1e-60, str(value)])
    return copy.deepcopy(chance.choice(ODD))


def _odd_tensor(value: Tensor, chance: random.Random) -> Any:
    broken = value.clone().flatten()
    if broken.numel():
        number = chance.choice([math.nan, math.inf, -math.inf])
        broken[chance.randrange(broken.numel())] = number if broken.is_floating_point() else -1
    strange = [broken, value.to(torch.complex64), value.to("meta"), value.bool(), value[:-1] if value.dim() else 0]
    strange += [value.double(), value.to_sparse() if value.dim() == 1 else 0, value.tolist(), torch.empty(0)]
    return chance.choice(strange)
