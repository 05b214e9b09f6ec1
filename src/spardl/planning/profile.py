"""When each gradient of a model is ready: the measured shape of one training step."""

import math
import statistics
import time
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


class BackwardClock:
    """Notes when the gradients of real steps are ready, and does nothing else to them."""

    def __init__(self) -> None:
        self.passes = 0
        self._ready: dict[str, list[float]] = {}
        self._forward: list[float] = []
        self._present: dict[str, float] = {}
        self._begun = self._ended = 0.0

    def forward_begins(self) -> None:
        self._begun = time.perf_counter()

    def forward_ends(self) -> None:
        """Backward counts from here, so that its first span holds the loss and what the user does before it."""
        self._ended = time.perf_counter()
        self._present = {}

    def stamp(self, name: str) -> None:
        """Note that this gradient is ready now."""
        self._present[name] = time.perf_counter() - self._ended

    def keep(self) -> None:
        """Let the pass that has just ended count."""
        self.passes += 1
        self._forward.append(self._ended - self._begun)
        for name, seconds in self._present.items():
            self._ready.setdefault(name, []).append(seconds)

    def reading(self) -> dict[str, Any]:
        """Medians over the passes kept: seconds of forward, and from its end to each gradient. Plain values."""
        ready = {name: statistics.median(seconds) for name, seconds in self._ready.items()}
        return {"forward": statistics.median(self._forward), "ready": ready}


def agreed(readings: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> Profile:
    """The mean of all ranks' readings as a profile; the same readings in the same order give the same bits.

    Layers come in the order of their mean times, so ranks need not have finished them in the same order. `sizes` are
    the elements of each parameter; one that no backward reached is ready when the last one is.
    """
    if not readings:
        raise ConfigError("there is no profile without readings; give one from each rank.")
    count = len(readings)
    means = {name: math.fsum(each["ready"].get(name, math.nan) for each in readings) / count for name in sizes}
    known = [mean for mean in means.values() if math.isfinite(mean)]
    last = max(known, default=0.0)
    ready = sorted(((mean if math.isfinite(mean) else last, name) for name, mean in means.items()), key=lambda p: p[0])
    layers, before = [], 0.0
    for seconds, name in ready:
        layers.append(Layer(name, sizes[name], max(0.0, seconds - before)))
        before = max(before, seconds)
    return Profile(tuple(layers), math.fsum(each["forward"] for each in readings) / count)


def _check_seconds(seconds: float, what: str) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (0 <= seconds < math.inf):
        raise ConfigError(f"{what} cannot take {seconds!r} seconds; give a finite number, 0 or more.")
