"""Sharded: a handle as `torch.distributed.checkpoint` saves and loads it, each rank its own part of one checkpoint.

What has a value per weight (residuals, velocities, weights of a rank's own) is kept under the name of the replica, laid
out as its parameter is; so a model in parts can be loaded in other parts. All the rest of a rank is a few bytes, or of
local updates also what its optimizers remember, and is kept as it is.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from spardl.errors import StateError
from spardl.integrations.optim.momentum import empty_like, flatten, in_memory_order
from spardl.sync.session import Session

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

# Where a state has a flat tensor per name, in the order of the weights' memory.
KINDS = ("residuals", "velocities", "local/shared", "local/own", "local/outer")

Tree = dict[str, Any]


class Saveable(Protocol):
    """What of a handle is needed here. `weights`: the parameters that its tensors belong to, if they do."""

    session: Session

    @property
    def weights(self) -> Mapping[str, Parameter]: ...

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Layout:
    """How many replicas there are, and in how many parts each of them lies."""

    replicas: int
    parts: int = 1

    @classmethod
    def of(cls, session: Session) -> "Layout":
        return cls(session.transport.workers, 1 if session.fellows is None else session.fellows.count)

    @classmethod
    def saved(cls, checkpoint: "str | PathLike[str] | StorageReader", key: str) -> "Layout":
        """That of the handle which a checkpoint keeps under this key.

        Raises:
            StateError: there is none.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # scripts without it need not wait for it

        reader = FileSystemReader(checkpoint) if isinstance(checkpoint, str | PathLike) else checkpoint
        known = reader.read_metadata().state_dict_metadata
        replicas = parts = 0
        while _rest_key(key, replicas, 0) in known:
            replicas += 1
        while _rest_key(key, 0, parts) in known:
            parts += 1
        if not replicas:
            raise StateError(
                f"this checkpoint has no state of spardl under {key!r}; save sync.sharded() under that key, or give"
                " the other one: sync.sharded(checkpoint, key=...)."
            )
        return cls(replicas, parts)


def _rest_key(key: str, replica: int, part: int) -> str:
    return f"{key}.replica {replica}.part {part}.rest"


class Sharded:
    """A `Stateful` of `torch.distributed.checkpoint`.

    Args:
        handle: whose state it is.
        layout: of the checkpoint that will be loaded; default: as things are now.
    """

    def __init__(self, handle: Saveable, layout: Layout | None = None) -> None:
        self._handle = handle
        self._now = Layout.of(handle.session)
        self._then = layout or self._now
        fellows = handle.session.fellows
        self._part = 0 if fellows is None else fellows.position

    def state_dict(self) -> Tree:
        """What this rank saves; or, before loading from another layout, what is to be filled."""
        own = self._entry(self._handle.state_dict())
        if self._then == self._now:
            return {f"replica {self._handle.session.transport.rank}": own}
        return {f"replica {index}": self._blank(own) for index in range(self._then.replicas)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was loaded: exactly, where the layout is the same.

        With another number of replicas, each begins with the mean of all. With other parts, weights, residuals and
        velocities are what they were; controllers begin anew, and optimizers stay as they are now.

        Raises:
            StateError: it does not fit, or is damaged; nothing was changed.
        """
        if self._then == self._now:
            state = self._state(state, self._handle.session.transport.rank)
        elif self._then.parts == self._now.parts:
            ranks = [self._state(state, index) for index in range(self._then.replicas)]
            state = {"version": ranks[0].get("version"), "workers": len(ranks), "ranks": ranks}
        else:
            state = self._moved([self._state(state, index) for index in range(self._then.replicas)])
        self._handle.load_state_dict(state)

    # --- between a rank's state and its entry in a checkpoint -----------------------------------------------------

    def _entry(self, state: Tree) -> Tree:
        rest, found = _without_tensors(state)
        weights: Tree = {}
        loose: Tree = {}
        for kind, tensors in found.items():
            for name, tensor in tensors.items():
                parameter = self._handle.weights.get(name)
                if parameter is None:
                    loose.setdefault(kind, {})[name] = tensor
                else:
                    weights.setdefault(kind, {})[name] = _shaped(tensor, parameter)
        packed = {"rest": _packed({"kinds": list(found), **rest}), "flat": loose}
        return {"weights": weights, f"part {self._part}": packed}

    def _blank(self, own: Tree) -> Tree:
        """Room for one replica's entry, of which other parts have other sizes."""
        if own[f"part {self._part}"]["flat"] and self._then.parts != self._now.parts:
            raise StateError(
                f"this checkpoint has {self._then.parts} parts per replica, and gradients that FSDP2 hands over in"
                f" backward fit no other number than they were saved with; here are {self._now.parts}."
            )
        part = self._part if self._then.parts == self._now.parts else 0
        weights = {kind: {n: torch.zeros_like(t) for n, t in each.items()} for kind, each in own["weights"].items()}
        packed = own[f"part {self._part}"]
        flat = {kind: {n: torch.zeros_like(t) for n, t in each.items()} for kind, each in packed["flat"].items()}
        return {"weights": weights, f"part {part}": {"rest": packed["rest"], "flat": flat}}

    def _state(self, state: Mapping[str, Any], replica: int) -> Tree:
        """One rank's state, from its entry."""
        part = self._part if self._then.parts == self._now.parts else 0
        entry = state[f"replica {replica}"]
        packed = entry[f"part {part}"]
        found = _unpacked(packed["rest"])
        for kind in found.pop("kinds"):
            tensors = dict(packed.get("flat", {}).get(kind, {}))
            for name, tensor in entry.get("weights", {}).get(kind, {}).items():
                tensors[name] = flatten(tensor, self._handle.weights[name])
            _put(found, kind, tensors)
        return found

    def _moved(self, ranks: list[Tree]) -> Tree:
        """This rank's own state with the mean of what replicas in other parts have had for its weights."""
        own, first = self._handle.state_dict(), ranks[0]
        names = {name for plan in self._handle.session.plan for name in plan.names}
        own.update(steps=first["steps"], started=sorted(names & set(first["started"])))
        if "local" in own:
            kept = {key: first["local"][key] for key in ("steps", "density", "pace", "buffers")}
            own["local"].update(kept, offered=None, landings={})
        _, found = _without_tensors(own)
        for kind, tensors in found.items():
            means = {n: torch.stack([_get(each, kind)[n].double() for each in ranks]).mean(0).float() for n in tensors}
            _put(own, kind, means)
        return own


def _without_tensors(state: Tree) -> tuple[Tree, dict[str, dict[str, Tensor]]]:
    """A state without what it has per weight, and that by kind."""
    rest = {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}
    found = {}
    for kind in KINDS:
        *path, last = kind.split("/")
        place = rest
        for step in path:
            place = place.get(step, {})
        if last in place:
            found[kind] = place.pop(last)
    return rest, found


def _get(state: Tree, kind: str) -> dict[str, Tensor]:
    for step in kind.split("/"):
        state = state[step]
    return state


def _put(state: Tree, kind: str, tensors: dict[str, Tensor]) -> None:
    *path, last = kind.split("/")
    for step in path:
        state = state[step]
    state[last] = tensors


def _shaped(flat: Tensor, parameter: Parameter) -> Tensor:
    """Values in the order of the weights' memory, as a tensor that is laid out as the parameter is."""
    shaped = empty_like(parameter, torch.float32)
    in_memory_order(shaped).copy_(flat)
    return shaped


def _packed(tree: Tree) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def _unpacked(packed: object) -> Tree:
    """What `_packed` was given; it comes from a file, so nothing in it is run."""
    if not isinstance(packed, bytes):
        raise StateError("this checkpoint's state of spardl is damaged; load another one.")
    try:
        tree = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(f"this checkpoint's state of spardl is damaged ({error}); load another one.") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("kinds"), list) or not set(tree["kinds"]) <= set(KINDS):
        raise StateError("this checkpoint's state of spardl is damaged; load another one.")
    return tree
