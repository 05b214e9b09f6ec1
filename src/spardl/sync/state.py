"""What a session saves and loads: residuals, velocities and controllers of one rank, or of all ranks in one.

A state says whose it is, and is checked whole before anything is changed: it comes from a file. Loaded where it was
saved it continues exactly. Gathered from all ranks it also loads in a world of another size: results are averages over
ranks, so every new rank gets the mean residual, and what all ranks hold together keeps its weight in the average.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spardl.choices import is_count, is_number
from spardl.collectives.program import Program, Team
from spardl.collectives.stretches import gather_bytes
from spardl.config import SyncConfig
from spardl.errors import StateError
from spardl.host import holds
from spardl.sync.plan import GroupPlan, arranged
from spardl.sync.synchronizer import Kept, Synchronizer

VERSION = 2
TENSORS = ("residuals", "velocities")

SAME = "load the state of the same model."


def save(sync: Synchronizer) -> dict[str, Any]:
    """This rank's state. Plain tensors and values only."""
    kept = sync.kept()
    return {
        "version": VERSION,
        "rank": sync.rank,
        "workers": sync.workers,
        "steps": sync.steps,
        "residuals": {name: each.residual for name, each in kept.items()},
        "velocities": {name: each.velocity for name, each in kept.items() if each.velocity is not None},
        "started": sorted(name for name, each in kept.items() if each.started),
        "groups": [plan.names for plan in sync.plan],
        "densities": [plan.density.settled for plan in sync.plan],
        "methods": [group.method.state_dict() for group in sync.groups],
    }


def gathered(sync: Synchronizer) -> Program[dict[str, Any]]:
    """All ranks' states as one, the same on every rank, for checkpoints that one rank writes for all.

    Cost: every rank receives the residuals and velocities of all others, tensor by tensor in ceil(log2 P) rounds.
    """
    team = Team(tuple(range(sync.workers)), sync.rank)
    own = save(sync)
    plain = {key: value for key, value in own.items() if key not in TENSORS}
    texts = yield from gather_bytes(team, np.frombuffer(json.dumps(plain).encode(), np.uint8))
    whole = [json.loads(text.tobytes()) | {kind: {} for kind in TENSORS} for text in texts]
    for kind in TENSORS:
        for name, tensor in own[kind].items():
            everyone = yield from gather_bytes(team, tensor.cpu().numpy().view(np.uint8))
            for state, received in zip(whole, everyone, strict=True):
                state[kind][name] = torch.from_numpy(received.copy().view(np.float32))
    return {"version": VERSION, "workers": sync.workers, "ranks": whole}


def load(sync: Synchronizer, config: SyncConfig, state: object, *, regroup: bool) -> None:
    """Continue where the state was saved.

    Groups stay as they are, unless `regroup` says to take those of the state. The controllers of groups that were
    others in the state start anew.

    Raises:
        StateError: it is another rank's, another world's or another model's, or its values cannot be. Nothing was
            changed then.
    """
    own = _own(state, sync.rank, sync.workers)
    sizes = _sizes(sync)
    kept = {} if sync.of_weights else _kept(own, sizes, sync.device, momentum=sync.has_momentum)
    plans = arranged(own["groups"], own["densities"], config, sizes, sync.workers) if regroup else sync.plan
    before, present = save(sync), sync.plan
    try:
        _apply(sync, own, kept, plans)
    except StateError:
        kept = {} if sync.of_weights else _kept(before, sizes, sync.device, momentum=sync.has_momentum)
        _apply(sync, before, kept, present)
        raise


def _apply(sync: Synchronizer, state: Mapping[str, Any], kept: dict[str, Kept], plans: list[GroupPlan]) -> None:
    sync.regroup(plans)
    sync.steps = state["steps"]
    groups = state["groups"]
    for group in sync.groups:
        for name in group.offsets:
            if name in kept:
                sync.restore(group, name, kept[name])
        if group.plan.names in groups and len(state["methods"]) == len(groups):
            group.method.load_state_dict(state["methods"][groups.index(group.plan.names)])


def _own(state: object, rank: int, workers: int) -> Mapping[str, Any]:
    """The part of a state that this rank continues from."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        version = state.get("version") if isinstance(state, Mapping) else None
        raise StateError(f"this state has version {version!r}; spardl here reads version {VERSION}.")
    if "ranks" not in state:
        return _checked(state, rank, workers)
    ranks = state["ranks"]
    if not isinstance(ranks, list) or not ranks:
        raise StateError("this state was gathered from no ranks; save it again.")
    whole = [_checked(each, position, len(ranks)) for position, each in enumerate(ranks)]
    return whole[rank] if len(whole) == workers else _mean(whole)


def _checked(state: object, rank: int, workers: int) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateError("this is no state that spardl has saved.")
    if (state.get("rank"), state.get("workers")) != (rank, workers):
        raise StateError(
            f"this state is of rank {state.get('rank')} of {state.get('workers')}, and this is rank {rank} of"
            f" {workers}; every rank loads the state that it has saved. To save one file for all ranks, or to go on"
            " with another number of workers, save gathered_state_dict()."
        )
    kinds = {"residuals": Mapping, "velocities": Mapping, "started": list, "groups": list}
    kinds |= {"densities": list, "methods": list}
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise StateError(f"this state has no usable {name}; {SAME}")
    if not is_count(state.get("steps")):
        raise StateError(f"this state was saved after {state.get('steps')!r} steps, which cannot be; {SAME}")
    if not all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in state["groups"]):
        raise StateError(f"this state has no usable groups; {SAME}")
    densities = state["densities"]
    if len(densities) != len(state["groups"]) or not all(each is None or _is_share(each) for each in densities):
        raise StateError(f"this state has no usable densities; {SAME}")
    if not all(isinstance(name, str) for name in state["started"]):
        raise StateError(f"this state has no usable list of what has momentum; {SAME}")
    return state


def _is_share(density: object) -> bool:
    return is_number(density) and 0 < float(density) <= 1  # type: ignore[arg-type]


def _mean(states: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What each rank of a world of another size starts from: means, and fresh controllers."""
    first = states[0]
    try:
        means = {
            kind: {
                name: torch.stack([each[kind][name].double() for each in states]).mean(0).float()
                for name in first[kind]
            }
            for kind in ("residuals", "velocities")
        }
    except (KeyError, AttributeError, RuntimeError, TypeError) as error:
        raise StateError(f"the ranks' parts of this state do not fit each other ({error}); {SAME}") from error
    return {**first, **means, "methods": []}


def _sizes(sync: Synchronizer) -> dict[str, int]:
    if sync.of_weights:
        return {member.name: member.elements for plan in sync.plan for member in plan.members}
    return {name: each.residual.numel() for name, each in sync.kept().items()}


def _kept(state: Mapping[str, Any], sizes: dict[str, int], device: torch.device, *, momentum: bool) -> dict[str, Kept]:
    """Every tensor's residual and velocity, checked against the model."""
    residuals = _tensors(state, "residuals", sizes, device)
    velocities = _tensors(state, "velocities", sizes, device)
    missing = sorted(set(sizes) - set(residuals))
    if missing:
        raise StateError(f"this state has no residual for {missing[0]!r}; {SAME}")
    if velocities and not momentum:
        raise StateError(
            "this state carries momentum, and there is none here to go on with it; attach with optimizer=... first."
        )
    started = set(state["started"])
    return {name: Kept(residuals[name], velocities.get(name), name in started) for name in sizes}


def _tensors(state: Mapping[str, Any], kind: str, sizes: dict[str, int], device: torch.device) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state[kind].items():
        if not isinstance(tensor, Tensor) or not _is_plain(tensor):
            raise StateError(f"the {kind} of {name!r} in this state are no floating-point tensor; {SAME}")
        if sizes.get(name) != tensor.numel():
            raise StateError(
                f"the {kind} of {name!r} in this state have {tensor.numel()} elements, but the model has"
                f" {sizes.get(name, 'no such parameter')}; {SAME}"
            )
        plain = tensor.detach().to(device=device, dtype=torch.float32, non_blocking=True).reshape(-1).contiguous()
        if not holds(torch.isfinite(plain).all()):
            raise StateError(f"the {kind} of {name!r} in this state are not finite: it is damaged; load another one.")
        found[name] = plain
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values are really there, one after the other."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
