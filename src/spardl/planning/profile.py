"""When each gradient of a model is ready: the measured shape of one training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spardl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter tensor. `seconds` is the backward time between the gradient before it and its own."""

    name: str
    elements: int
    seconds: float

    def __post_init__(self) -> None:
        _check_seconds(self.seconds, f"layer {self.name!r}")
        if isinstance(self.elements, bool) or not isinstance(self.elements, int) or self.elements < 0:
            raise ConfigError(
                f"layer {self.name!r} cannot have {self.elements!r} elements; give a whole number, 0 or more."
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """Layers in backward order, so the model's last layer comes first, and the seconds of the forward pass."""

    layers: tuple[Layer, ...]
    forward: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.forward, "the forward pass")
        if not self.layers:
            raise ConfigError("a profile without layers leaves nothing to plan; give at least one.")
        names: set[str] = set()
        for layer in self.layers:
            if layer.name in names:
                raise ConfigError(f"layer {layer.name!r} appears twice in this profile; names must be unique.")
            names.add(layer.name)

    @property
    def elements(self) -> int:
        return sum(layer.elements for layer in self.layers)

    @property
    def backward(self) -> float:
        """Seconds of the whole backward pass."""
        return math.fsum(layer.seconds for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        layers = [{"name": each.name, "elements": each.elements, "seconds": each.seconds} for each in self.layers]
        return {"forward": self.forward, "layers": layers}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Profile":
        """What `to_dict` made, checked."""
        try:
            layers = tuple(Layer(str(each["name"]), each["elements"], each["seconds"]) for each in given["layers"])
            return cls(layers, given["forward"])
        except KeyError as error:
            raise ConfigError(f"this profile has no {error.args[0]!r}; write it with Profile.to_dict.") from None
        except TypeError:
            raise ConfigError(
                "this is not a profile: it must be a mapping with 'forward' (seconds) and 'layers' (a list of"
                " mappings with 'name', 'elements' and 'seconds')."
            ) from None


def average(profiles: Sequence[Profile]) -> Profile:
    """The mean over ranks. The same profiles in the same order give the same bits on every rank."""
    if not profiles:
        raise ConfigError("there is no mean of no profiles; give one from each rank.")
    for rank, profile in enumerate(profiles):
        _check_same_layers(profiles[0], profile, rank)
    count = len(profiles)
    seconds = [math.fsum(times) / count for times in zip(*(_seconds(each) for each in profiles), strict=True)]
    layers = tuple(
        Layer(layer.name, layer.elements, mean) for layer, mean in zip(profiles[0].layers, seconds, strict=True)
    )
    return Profile(layers, math.fsum(each.forward for each in profiles) / count)


def _seconds(profile: Profile) -> list[float]:
    return [layer.seconds for layer in profile.layers]


def _check_same_layers(first: Profile, other: Profile, rank: int) -> None:
    remedy = "profile the same model on all ranks."
    if len(first.layers) != len(other.layers):
        raise ConfigError(
            f"rank 0 profiled {len(first.layers)} layers and rank {rank} profiled {len(other.layers)}; {remedy}"
        )
    for place, (ours, theirs) in enumerate(zip(first.layers, other.layers, strict=True)):
        if ours.name != theirs.name:
            raise ConfigError(
                f"in backward order, layer {place} is {ours.name!r} on rank 0 and {theirs.name!r} on rank {rank};"
                f" {remedy}"
            )
        if ours.elements != theirs.elements:
            raise ConfigError(
                f"layer {ours.name!r} has {ours.elements} elements on rank 0 and {theirs.elements} on rank {rank};"
                f" {remedy}"
            )


def _check_seconds(seconds: float, what: str) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (0 <= seconds < math.inf):
        raise ConfigError(f"{what} cannot take {seconds!r} seconds; give a finite number, 0 or more.")
