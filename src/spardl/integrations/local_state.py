"""What local updates save beside a session's state: weights, shared and own, and what else is each rank's own.

A state comes from a file, so it is checked whole before anything is changed. Gathered from all ranks it also loads with
another number of workers: the shared weights are what they were, and every new rank begins at the mean of all own ones,
with the mean of what the optimizers remember. An exchange that was under way has changed nothing yet, and is dropped.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spardl.choices import is_count, is_number
from spardl.errors import StateError
from spardl.host import holds
from spardl.integrations.parts import part_of, placed_like
from spardl.sync.landing import Landing

SAME = "load the state of the same model."
KEYS = {"steps", "offered", "density", "pace", "shared", "own", "outer", "rates", "landings"}
KEYS |= {"buffers", "optimizers", "scaler"}  # each rank's own

Sizes = Mapping[str, int]


def own_part(state: object, rank: int, workers: int, sizes: Sizes) -> dict[str, Any]:
    """This rank's part of a state, one rank's or gathered, if it fits weights of these sizes.

    Raises:
        StateError: it does not.
    """
    if not isinstance(state, Mapping):
        raise StateError("this is no state that spardl has saved.")
    if "ranks" not in state:
        return checked(state, sizes)
    ranks = state["ranks"]
    if not isinstance(ranks, list) or not ranks:
        raise StateError("this state was gathered from no ranks; save it again.")
    whole = [checked(each, sizes) for each in ranks]
    return whole[rank] if len(whole) == workers else _mean(whole)


def checked(state: object, sizes: Sizes) -> dict[str, Any]:
    """What of a rank's state is about local updates."""
    local = state.get("local") if isinstance(state, Mapping) else None
    if not isinstance(local, Mapping) or set(local) != KEYS:
        raise StateError("this state is not one of local updates; attach as when it was saved.")
    for kind in ("shared", "own"):
        _check_tensors(local[kind], f"{kind} weights", sizes)
    if local["outer"]:
        _check_tensors(local["outer"], "outer momentum", sizes)
    offered = local["offered"]
    if not is_count(local["steps"]) or not (offered is None or is_count(offered)):
        raise StateError(f"this state was saved after {local['steps']!r} steps, which cannot be; {SAME}")
    density = local["density"]
    if density is not None and not (is_number(density) and 0 < density <= 1):
        raise StateError(f"this state has the density {density!r}, which cannot be; {SAME}")
    pace = local["pace"]
    if pace is not None and not (isinstance(pace, list) and all(is_count(each, least=1) for each in pace)):
        raise StateError(f"this state has ranks that take {pace!r} local steps, which cannot be; {SAME}")
    rates = local["rates"]
    if not (isinstance(rates, list) and len(rates) == 2 and all(is_number(each) and each > 0 for each in rates)):
        raise StateError(f"this state has the outer rates {rates!r}, which cannot be; {SAME}")
    if not isinstance(local["optimizers"], list) or not isinstance(local["buffers"], Mapping):
        raise StateError(f"this state has no usable optimizers or buffers; {SAME}")
    _check_scaler(local["scaler"])
    return {**local, "landings": _landings(local["landings"], sizes)}


def _check_tensors(tensors: object, what: str, sizes: Sizes) -> None:
    if not isinstance(tensors, Mapping) or set(tensors) != set(sizes):
        raise StateError(f"the {what} in this state are another model's; {SAME}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32 or tensor.numel() != sizes[name]:
            raise StateError(f"the {what} of {name!r} in this state do not fit the model's; {SAME}")
        if not holds(torch.isfinite(tensor).all()):
            raise StateError(f"the {what} of {name!r} in this state are not finite: it is damaged; load another one.")


def _check_scaler(saved: object) -> None:
    """Empty where no GradScaler was in use."""
    if isinstance(saved, Mapping):
        numbers = all(is_number(each) and each >= 0 for each in saved.values())
        if not saved or (numbers and saved.get("scale", 0) > 0):
            return
    raise StateError(f"this state has a part of a GradScaler that cannot be; {SAME}")


def _landings(saved: object, sizes: Sizes) -> dict[str, Landing]:
    if not isinstance(saved, Mapping) or not set(saved) <= set(sizes):
        raise StateError(f"what was under way in this state is another model's; {SAME}")
    return {name: _landing(each, name, sizes[name]) for name, each in saved.items()}


def _landing(saved: object, name: str, size: int) -> Landing:
    fields = [each.name for each in dataclasses.fields(Landing)]
    if not isinstance(saved, Mapping) or set(saved) != set(fields):
        raise StateError(f"what was under way for {name!r} in this state is incomplete; {SAME}")
    landing = Landing(**saved)
    for places, values in ((landing.support, landing.agreed), (landing.touched, landing.sent)):
        if not isinstance(values, Tensor) or values.dtype is not torch.float32 or not holds(values.isfinite().all()):
            raise StateError(f"what was under way for {name!r} in this state is not finite: it is damaged.")
        if places is None:
            fits = values.numel() == size
        else:
            fits = isinstance(places, Tensor) and places.dtype is torch.int64 and places.shape == values.shape
            fits = fits and (not places.numel() or holds(((places >= 0) & (places < size)).all()))
        if not fits:
            raise StateError(f"what was under way for {name!r} in this state leaves the tensor; {SAME}")
    return landing


def optimizer_parts(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state, of which a model in parts has this rank's: plain tensors, that load anywhere."""
    saved = optimizer.state_dict()
    memory = {index: {key: _plain(value) for key, value in each.items()} for index, each in saved["state"].items()}
    return {**saved, "state": memory}


def _plain(value: Any) -> Any:
    return part_of(value) if isinstance(value, Tensor) else value


def on_host(tree: Any) -> Any:
    """The same tree, with tensors in the host's memory: whoever reads it may have no such device, or fewer of them."""
    if isinstance(tree, Tensor):
        return tree.cpu()
    if isinstance(tree, Mapping):
        return {key: on_host(each) for key, each in tree.items()}
    return type(tree)(map(on_host, tree)) if isinstance(tree, list | tuple) else tree


def with_parts(optimizer: Optimizer, saved: Any) -> Any:
    """What `optimizer_parts` gave, as the optimizer itself would have it."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    memory = {index: _placed(each, parameters[index]) for index, each in saved["state"].items()}
    return {**saved, "state": memory}


def _placed(memory: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Tensors of the size of this rank's part of a parameter are part of tensors of the parameter's size."""
    shape = part_of(parameter).shape
    return {
        key: placed_like(value, parameter) if isinstance(value, Tensor) and value.shape == shape else value
        for key, value in memory.items()
    }


def _mean(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What each rank of a world of another size begins with."""
    first = states[0]
    own = {name: _mean_of([each["own"][name] for each in states]) for name in first["own"]}
    optimizers = [mean_tree([each["optimizers"][i] for each in states]) for i in range(len(first["optimizers"]))]
    buffers = mean_tree([each["buffers"] for each in states])
    return {**first, "own": own, "optimizers": optimizers, "buffers": buffers, "offered": None, "landings": {}}


def mean_tree(trees: Sequence[Any]) -> Any:
    """The same tree with means for its floating-point tensors; everything else is the first one's."""
    first = trees[0]
    try:
        if isinstance(first, Tensor):
            return _mean_of(trees) if first.is_floating_point() else first
        if isinstance(first, Mapping):
            return {key: mean_tree([each[key] for each in trees]) for key in first}
        if isinstance(first, list | tuple):
            return type(first)(mean_tree([each[i] for each in trees]) for i in range(len(first)))
    except (KeyError, IndexError, TypeError, RuntimeError) as error:
        raise StateError(f"the ranks' parts of this state do not fit each other ({error}); {SAME}") from error
    return first


def _mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.double() for each in tensors]).mean(0).to(tensors[0].dtype)


def load_optimizers(optimizers: Sequence[Optimizer], saved: Sequence[Any]) -> None:
    """Give each optimizer its part of a state."""
    if len(saved) != len(optimizers):
        raise StateError(f"this state has {len(saved)} optimizer(s), not {len(optimizers)}; give as many.")
    for optimizer, state in zip(optimizers, saved, strict=True):
        try:
            optimizer.load_state_dict(with_parts(optimizer, state))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StateError(f"{type(optimizer).__name__} cannot load its part of this state: {error}") from error
