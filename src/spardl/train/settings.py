"""How a recipe is trained, apart from how its gradients are synchronised. No torch here."""

import dataclasses
import math
from dataclasses import dataclass

from spardl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """SGD with a learning rate that falls to zero along half a cosine.

    epochs        passes over the training data
    batch_size    examples per worker and step
    lr            learning rate of the first step
    momentum      of SGD; sparse methods apply it before the selection
    weight_decay  of SGD; likewise
    seed          of the initial weights and the shuffling
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"{self.epochs} epochs train nothing; give 1 or more.")
        if self.batch_size < 1:
            raise ConfigError(f"batches of {self.batch_size} hold nothing; give 1 or more.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ConfigError(f"a learning rate of {self.lr} teaches nothing; give a number above 0.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum} is outside [0, 1); 0.9 is usual.")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"weight decay {self.weight_decay} is not a decay; give 0 or more.")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed} is negative; give 0 or more.")


SETTINGS = tuple(field.name for field in dataclasses.fields(TrainSettings))
