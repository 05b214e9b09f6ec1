"""How a recipe is trained, apart from how its gradients are synchronised. No torch here."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spardl.choices import check_choice, is_count, is_number
from spardl.errors import ConfigError

Optimizer = Literal["sgd", "adam", "adamw"]
Schedule = Literal["cosine", "milestones", "linear", "constant"]
Decay = Literal["all", "matrices"]
Amp = Literal["off", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a model is trained. These names are options of `spardl train` and keys of its configuration file.

    epochs        passes over the training data
    batch_size    examples per worker and micro-batch
    accumulate    micro-batches per step; their mean gradient is synchronised once
    optimizer     "sgd", "adam" or "adamw" (decoupled decay)
    lr            the highest learning rate
    reference_batch  if given, `lr` is meant for so many examples per step over all workers, and scaled to what there is
    momentum      of SGD; sparse methods apply it before the selection
    nesterov      of SGD
    betas         of Adam
    epsilon       of Adam
    weight_decay  of any optimizer
    decay         which parameters decay: "all", or "matrices", those with two dimensions and more, so neither biases
                  nor the scales of norms; left out, AdamW takes the latter and the others the former
    schedule      what follows the warm-up: "cosine" and "linear" fall to `floor` until the end of the last epoch,
                  "milestones" multiplies by `gamma` at each, "constant" stays
    floor         the share of the rate that a cosine or linear schedule ends with
    floor_step    the step at which it gets there; left out, the end of the last epoch
    warmup        epochs over which the rate rises linearly
    warmup_steps  the same in steps, instead of epochs
    warmup_start  the share of the rate that it starts from; left out, one over the number of workers
    milestones    in epochs
    gamma         what a milestone multiplies the rate by
    clip          the largest norm of the averaged gradient; sparse methods clip each worker's own before the
                  selection, to sqrt(workers) times that; with local updates it is of each worker's own gradient
    amp           "bf16" runs forward and loss under autocast
    window        tokens that a model of text sees at once; left out, what its data set is usually cut into
    subset        train on so many examples only, evenly spread; of a stream, on its first so many tokens
    max_steps     stop after so many, whatever the epochs say; schedules do not move
    eval_every    epochs from one test to the next; 0 tests the last one only, which is always tested
    eval_steps    steps from one test to the next, beside those of epochs; 0 tests at the end of epochs only
    eval_batch    examples per worker and batch of a test; it has no bearing on the figures, only on memory
    loaders       processes per worker that prepare batches
    seed          of the initial weights, the shuffling and everything else that is random
    """

    epochs: int
    batch_size: int
    lr: float
    accumulate: int = 1
    optimizer: Optimizer = "sgd"
    reference_batch: int | None = None
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay: Decay | None = None
    schedule: Schedule = "cosine"
    floor: float = 0.0
    floor_step: int | None = None
    warmup: float = 0.0
    warmup_steps: int = 0
    warmup_start: float | None = None
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    clip: float | None = None
    amp: Amp = "off"
    window: int | None = None
    subset: int | None = None
    max_steps: int | None = None
    eval_every: int = 1
    eval_steps: int = 0
    eval_batch: int = 256
    loaders: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("schedule", self.schedule, get_args(Schedule))
        check_choice("amp", self.amp, get_args(Amp))
        if self.decay is not None:
            check_choice("decay", self.decay, get_args(Decay))
        _check(is_count(self.epochs, least=1), f"{self.epochs} epochs train nothing; give 1 or more.")
        _check(is_count(self.batch_size, least=1), f"batches of {self.batch_size} hold nothing; give 1 or more.")
        _check(is_count(self.accumulate, least=1), f"{self.accumulate} micro-batches train nothing; give 1 or more.")
        _check(_above_zero(self.lr), f"a learning rate of {self.lr} teaches nothing; give a number above 0.")
        _check(_is_share(self.momentum), f"momentum {self.momentum} is outside [0, 1); 0.9 is usual.")
        _check(
            not self.nesterov or self.optimizer != "sgd" or self.momentum > 0,
            "nesterov without momentum is plain SGD; give a momentum, or leave nesterov out.",
        )
        _check(
            len(self.betas) == 2 and all(_is_share(beta) for beta in self.betas),
            f"betas {_listed(self.betas)} are not two numbers in [0, 1); 0.9,0.999 are usual.",
        )
        _check(_above_zero(self.epsilon), f"epsilon {self.epsilon} is not above 0; 1e-8 is usual.")
        _check(
            is_number(self.weight_decay) and self.weight_decay >= 0,
            f"weight decay {self.weight_decay} is not a decay; give 0 or more.",
        )
        _check(
            is_number(self.warmup) and 0 <= self.warmup < self.epochs,
            f"a warm-up of {self.warmup:g} epochs does not fit into {self.epochs}; make it shorter.",
        )
        _check(
            not (self.warmup and self.warmup_steps),
            f"a warm-up lasts {self.warmup:g} epochs or {self.warmup_steps} steps, not both; leave one out.",
        )
        _check(
            is_number(self.floor) and 0 <= self.floor <= 1,
            f"a learning rate cannot end at {self.floor} of the highest; give a floor from 0 to 1.",
        )
        _check(
            self.warmup_start is None or (is_number(self.warmup_start) and 0 <= self.warmup_start <= 1),
            f"a warm-up cannot start at {self.warmup_start} of the learning rate; give a share from 0 to 1.",
        )
        _check(
            all(_above_zero(one) for one in self.milestones) and list(self.milestones) == sorted(set(self.milestones)),
            f"milestones {_listed(self.milestones)} do not rise; give epochs above 0 in ascending order, as 81,122.",
        )
        _check(
            bool(self.milestones) == (self.schedule == "milestones"),
            f"the schedule is {self.schedule}, with milestones {_listed(self.milestones) or 'none'};"
            " give milestones with the schedule milestones, and with no other.",
        )
        _check(0 < self.gamma < 1, f"gamma {self.gamma} is outside (0, 1); 0.1 is usual.")
        _check(
            self.clip is None or _above_zero(self.clip), f"clip {self.clip} leaves no gradient; give a norm above 0."
        )
        for name in ("reference_batch", "floor_step", "eval_batch", "window", "subset", "max_steps"):
            number = getattr(self, name)
            _check(number is None or is_count(number, least=1), f"{_spelt(name)} {number} is not 1 or more.")
        for name in ("warmup_steps", "eval_every", "eval_steps", "loaders", "seed"):
            number = getattr(self, name)
            _check(is_count(number), f"{_spelt(name)} {number} is not a whole number from 0 on.")
        _check(
            self.floor_step is None or self.floor_step > self.warmup_steps,
            f"a rate that rises for {self.warmup_steps} steps cannot have fallen at step {self.floor_step};"
            " make floor-step larger.",
        )

    @property
    def decays_all(self) -> bool:
        """Whether weight decay applies to vectors too: biases, and the scales of norms."""
        return self.decay == "all" if self.decay is not None else self.optimizer != "adamw"

    @property
    def falls_until_the_end(self) -> bool:
        """Whether the rate of a step depends on how many epochs there will be."""
        return self.schedule in ("cosine", "linear") and self.floor_step is None

    @property
    def trajectory(self) -> dict[str, Any]:
        """What a run's course depends on: everything but its length, how it is watched, and who loads data."""
        settings = dataclasses.asdict(self)
        return {name: value for name, value in settings.items() if name not in _BESIDE}


SETTINGS = tuple(field.name for field in dataclasses.fields(TrainSettings))

_BESIDE = ("max_steps", "eval_every", "eval_steps", "eval_batch", "loaders")

# Settings that mean something under certain others only.
_BELONGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("optimizer", ("sgd",)),
    "nesterov": ("optimizer", ("sgd",)),
    "betas": ("optimizer", ("adam", "adamw")),
    "epsilon": ("optimizer", ("adam", "adamw")),
    "floor": ("schedule", ("cosine", "linear")),
    "floor_step": ("schedule", ("cosine", "linear")),
    "milestones": ("schedule", ("milestones",)),
    "gamma": ("schedule", ("milestones",)),
}


def changed(settings: TrainSettings, given: Mapping[str, Any]) -> TrainSettings:
    """`settings` with what was given instead.

    Milestones and warm-up are in epochs: where only the number of epochs changes, they move in proportion. A warm-up in
    epochs takes the place of one in steps, and the other way round. What was not given and belongs to an optimizer or a
    schedule that is no longer there falls back to its default; what was given and does not fit is refused.
    """
    merged: dict[str, Any] = {**dataclasses.asdict(settings), **given}
    if "warmup" in given and "warmup_steps" not in given:
        merged["warmup_steps"] = 0
    if is_count(merged["epochs"], least=1):
        ratio = merged["epochs"] / settings.epochs
        if "warmup" not in given:
            merged["warmup"] = settings.warmup * ratio if not merged["warmup_steps"] else 0.0
        if "milestones" not in given:
            merged["milestones"] = tuple(one * ratio for one in settings.milestones)
    for name, (owner, fitting) in _BELONGS.items():
        if merged[owner] in fitting:
            continue
        if name in given:
            raise ConfigError(
                f"{_spelt(name)} belongs to the {owner} {' or '.join(fitting)}, and the {owner} is {merged[owner]};"
                f" leave it out, or change the {owner}."
            )
        merged[name] = TrainSettings.__dataclass_fields__[name].default
    if "momentum" in given and not given["momentum"] and "nesterov" not in given:
        merged["nesterov"] = False
    return TrainSettings(**merged)


def _check(fine: bool, sentence: str) -> None:
    if not fine:
        raise ConfigError(sentence)


def _above_zero(given: object) -> bool:
    return is_number(given) and float(given) > 0  # type: ignore[arg-type]


def _is_share(given: object) -> bool:
    return is_number(given) and 0 <= float(given) < 1  # type: ignore[arg-type]


def _spelt(name: str) -> str:
    return name.replace("_", "-")


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:g}" if is_number(number) else repr(number) for number in numbers)
