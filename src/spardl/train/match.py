"""Who takes part in a benchmark, and under which conditions. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spardl.config import METHODS, SyncConfig, check_choice
from spardl.errors import ConfigError

# What a user would pick instead of a method of ours, beside torch's dense all-reduce.
PEERS = ("fp16", "powersgd-1", "powersgd-4", "handwritten-topk")
SPARSE_PEERS = ("handwritten-topk",)  # once per density


@dataclass(frozen=True, kw_only=True)
class Match:
    """Each of `configs` and `peers`, `repetitions` times, taking turns.

    densities   of the peers that have one
    latency     seconds that are added to every message
    rate        of the links, in bytes per second, for the limits; it limits nothing itself
    """

    configs: Sequence[SyncConfig]
    peers: Sequence[str] = ()
    densities: Sequence[float] = (0.01,)
    repetitions: int = 20
    warmup: int = 3
    seed: int = 0
    latency: float = 0.0
    rate: float = math.inf

    def __post_init__(self) -> None:
        for name in self.peers:
            check_choice("peer", name, PEERS, hint="or all, or none")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"a latency of {self.latency} s cannot be waited for; give 0 or more.")

    def facts(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        return {
            "configurations": [config.to_dict() for config in self.configs],
            "peers": list(self.peers),
            "densities": list(self.densities),
            "repetitions": self.repetitions,
            "warmup": self.warmup,
            "latency": self.latency,
        }


def sends_everything(method: str) -> bool:
    """Whether a method has neither density nor value format."""
    return METHODS[method].startswith("spardl.collectives.dense:")
