"""Who takes part in a benchmark, and under which conditions. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spardl.choices import check_choice
from spardl.collectives.methods.registry import method_class
from spardl.config import SyncConfig
from spardl.errors import ConfigError

# What a user would pick instead of a method of ours, beside torch's dense all-reduce.
RIVALS = ("fp16", "powersgd-1", "powersgd-4", "handwritten-topk")
SPARSE_RIVALS = ("handwritten-topk",)  # once per density


@dataclass(frozen=True, kw_only=True)
class Match:
    """Each of `configs` and `rivals`, `repetitions` times, taking turns.

    densities   of the rivals that have one
    latency     seconds that are added to every message
    rate        of the links, in bytes per second, for the limits; it limits nothing itself
    """

    configs: Sequence[SyncConfig]
    rivals: Sequence[str] = ()
    densities: Sequence[float] = (0.01,)
    repetitions: int = 20
    warmup: int = 3
    seed: int = 0
    latency: float = 0.0
    rate: float = math.inf

    def __post_init__(self) -> None:
        for name in self.rivals:
            check_choice("rival", name, RIVALS, hint="or all, or none")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"a latency of {self.latency} s cannot be waited for; give 0 or more.")

    def facts(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        return {
            "configurations": [config.to_dict() for config in self.configs],
            "rivals": list(self.rivals),
            "densities": list(self.densities),
            "repetitions": self.repetitions,
            "warmup": self.warmup,
            "latency": self.latency,
        }


def sends_everything(method: str) -> bool:
    """Whether a method has neither density nor value format."""
    return method_class(method).about.dense
