"""What a training has come to, epoch by epoch and at its end. No torch here."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spardl.config import SyncConfig
from spardl.metrics import GroupStats, Traffic
from spardl.train.settings import TrainSettings
from spardl.update import GRADIENTS, PRESETS, LocalUpdates, resolve


def rule_name(rule: LocalUpdates | None) -> str:
    """What people call an update rule: the published way that it follows, at whatever intervals, or local."""
    if rule is None:
        return GRADIENTS
    for name in PRESETS:
        if resolve(name, {"every": rule.every})[0] == rule:
            return name
    return "local"


def way(method: str, rule: LocalUpdates | None) -> str:
    """How a run is synchronised, in a word or two."""
    return method if rule is None else f"{method}, {rule_name(rule)}"


@dataclass(frozen=True)
class SyncCosts:
    """What synchronisation has cost one rank over some steps. `places` are elements times steps; selecting is all that
    the rank does itself, packing included."""

    rounds: float = 0
    bytes_sent: float = 0
    entries_sent: float = 0
    entries: float = 0
    places: float = 0
    seconds_selecting: float = 0.0
    seconds_waiting: float = 0.0
    seconds_transferring: float = 0.0

    @classmethod
    def of(cls, total: GroupStats) -> "SyncCosts":
        return cls(
            rounds=total.rounds,
            bytes_sent=total.bytes_sent,
            entries_sent=total.entries_sent,
            entries=total.entries,
            places=total.elements * total.steps,
            seconds_selecting=total.seconds_selecting + total.seconds_packing,
            seconds_waiting=total.seconds_waiting,
            seconds_transferring=total.seconds_transferring,
        )

    @classmethod
    def between(cls, before: Traffic, after: Traffic) -> "SyncCosts":
        """What was moved outside of steps: no entries, only bytes and time."""
        transferring = after.seconds_transferring - before.seconds_transferring
        return cls(
            rounds=after.rounds - before.rounds,
            bytes_sent=after.bytes_sent - before.bytes_sent,
            seconds_waiting=after.seconds - before.seconds - transferring,
            seconds_transferring=transferring,
        )

    def __add__(self, other: "SyncCosts") -> "SyncCosts":
        return SyncCosts(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: "SyncCosts") -> "SyncCosts":
        """What has come since `other`: totals never go back."""
        return SyncCosts(*(mine - theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    @property
    def density(self) -> float:
        return self.entries / self.places if self.places else 0.0

    @property
    def bits_per_entry(self) -> float:
        return 8 * self.bytes_sent / self.entries_sent if self.entries_sent else 0.0

    @property
    def seconds(self) -> float:
        return self.seconds_selecting + self.seconds_waiting + self.seconds_transferring

    def _values(self) -> tuple[float, ...]:
        return tuple(getattr(self, each.name) for each in dataclasses.fields(self))


@dataclass(frozen=True)
class EpochReport:
    """One epoch: training loss over all ranks, figures on the whole test set, and where its time went.

    epoch    counted from 1; the last one may have been cut short
    step     of the run, at its end
    figures  by name, `loss` and the task's metric among them; empty if it was not tested
    seconds  of training alone, without the test and checkpoints; computing is what synchronisation left of it, so where
             the two overlap it counts less than it took
    costs    of this rank
    """

    epoch: int
    step: int
    train_loss: float
    figures: dict[str, float]
    lr: float
    seconds: float
    samples_per_second: float
    costs: SyncCosts

    @property
    def seconds_computing(self) -> float:
        return max(0.0, self.seconds - self.costs.seconds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "train_loss": self.train_loss,
            "figures": self.figures,
            "lr": self.lr,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "seconds_computing": self.seconds_computing,
            **dataclasses.asdict(self.costs),
            "density": self.costs.density,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "EpochReport":
        costs = SyncCosts(**{each.name: record[each.name] for each in dataclasses.fields(SyncCosts)})
        own = {each.name: record[each.name] for each in dataclasses.fields(cls) if each.name != "costs"}
        return cls(**own, costs=costs)


@dataclass(frozen=True)
class Reading:
    """A test of the model, in the middle of an epoch or at its end, and what this rank had spent on training by then.

    seconds  since the run began, without tests and checkpoints
    figures  by name, `loss` and the task's metric among them
    """

    step: int
    seconds: float
    bytes_sent: float
    figures: dict[str, float]


@dataclass(frozen=True)
class TrainReport:
    """One run. Costs are this rank's. Density is what was asked for at the end, and what came.

    metric             the figure that counts, and `better` its good direction
    parameters_sha256  of all parameters and buffers at the end: equal for two runs that ended alike, bit for bit
    resumed_at         the step of the checkpoint that it went on from, or None
    note               what a reader should know of the data
    rule               how weights are exchanged that each rank steps by itself; None where gradients are
    chosen             where the method was auto: what was in force at the end
    readings           every test, in the order of the steps
    """

    recipe: str
    model: str
    data: str
    method: str
    workers: int
    metric: str
    better: Literal["higher", "lower"]
    settings: TrainSettings
    config: SyncConfig
    parameters: int
    steps: int
    density: float
    parameters_sha256: str
    resumed_at: int | None = None
    note: str = ""
    rule: LocalUpdates | None = None
    chosen: str | None = None
    epochs: list[EpochReport] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        return self.epochs[-1].figures

    @property
    def way(self) -> str:
        """How it was synchronised, in a word or two."""
        return way(self.method if self.chosen is None else f"{self.method} ({self.chosen})", self.rule)

    @property
    def score(self) -> float:
        """The metric at the end."""
        return self.figures[self.metric]

    @property
    def test_loss(self) -> float:
        return self.figures["loss"]

    @property
    def train_loss(self) -> float:
        return self.epochs[-1].train_loss

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.epochs)

    @property
    def samples_per_second(self) -> float:
        seconds = self.seconds
        return sum(each.samples_per_second * each.seconds for each in self.epochs) / seconds if seconds else 0.0

    @property
    def costs(self) -> SyncCosts:
        return sum((report.costs for report in self.epochs), start=SyncCosts())

    @property
    def seconds_computing(self) -> float:
        return sum(report.seconds_computing for report in self.epochs)

    @property
    def bytes_per_step(self) -> float:
        return self.costs.bytes_sent / self.steps

    @property
    def achieved_density(self) -> float:
        return self.costs.density

    def is_as_good(self, score: float, goal: float) -> bool:
        return score >= goal if self.better == "higher" else score <= goal

    def first_as_good(self, goal: float) -> Reading | None:
        """The first test whose metric is at least as good as `goal`; None if there is none."""
        return next((each for each in self.readings if self.is_as_good(each.figures[self.metric], goal)), None)

    def seconds_to(self, goal: float) -> float | None:
        """Training time to the first test that is as good as `goal`; None if there is none."""
        reading = self.first_as_good(goal)
        return None if reading is None else reading.seconds

    def to_dict(self) -> dict[str, Any]:
        costs = self.costs
        own = ("recipe", "model", "data", "method", "workers", "parameters", "steps", "metric", "better")
        return {
            **{name: getattr(self, name) for name in own},
            "figures": self.figures,
            "train_loss": self.train_loss,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "seconds_computing": self.seconds_computing,
            "seconds_selecting": costs.seconds_selecting,
            "seconds_waiting": costs.seconds_waiting,
            "seconds_transferring": costs.seconds_transferring,
            "bytes_sent": costs.bytes_sent,
            "bytes_per_step": self.bytes_per_step,
            "rounds_per_step": costs.rounds / self.steps,
            "bits_per_entry": costs.bits_per_entry,
            "density": self.density,
            "achieved_density": self.achieved_density,
            "parameters_sha256": self.parameters_sha256,
            "resumed_at": self.resumed_at,
            "note": self.note,
            "settings": dataclasses.asdict(self.settings),
            "config": dataclasses.asdict(self.config),
            "update": rule_name(self.rule),
            "chosen": self.chosen,
            "rule": None if self.rule is None else dataclasses.asdict(self.rule),
            "epochs": [report.to_dict() for report in self.epochs],
            "readings": [dataclasses.asdict(reading) for reading in self.readings],
        }


@dataclass(frozen=True)
class Outline:
    """What a run is about to do. `way` is what people call how it is synchronised; `first_step` is not 0 where it goes
    on from a checkpoint."""

    recipe: str
    method: str
    way: str
    workers: int
    metric: str
    epochs: int
    steps_per_epoch: int
    first_step: int
    last_step: int
    samples_per_step: int


@dataclass(frozen=True)
class StepReport:
    """One step on this rank: the loss of its own batch."""

    step: int
    epoch: int
    loss: float
    lr: float
    seconds: float


class Observer(Protocol):
    """Who watches a run, on any rank."""

    def begin(self, outline: Outline) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def tested(self, reading: Reading) -> None:
        """In the middle of an epoch; what a test at its end has found is told with the epoch."""
        ...

    def epoch(self, report: EpochReport) -> None: ...


class Quiet:
    """Watches nothing; a base for those who watch some of it."""

    def begin(self, outline: Outline) -> None:
        pass

    def step(self, report: StepReport) -> None:
        pass

    def tested(self, reading: Reading) -> None:
        pass

    def epoch(self, report: EpochReport) -> None:
        pass


class Several:
    """Tells each observer."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def begin(self, outline: Outline) -> None:
        for observer in self._observers:
            observer.begin(outline)

    def step(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.step(report)

    def tested(self, reading: Reading) -> None:
        for observer in self._observers:
            observer.tested(reading)

    def epoch(self, report: EpochReport) -> None:
        for observer in self._observers:
            observer.epoch(report)
