"""One trial: which run is attacked, what happens to it, where, and what must come of it. Made from a seed alone."""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

TIMEOUT_S = 3.0  # of the runs that are attacked, unless told otherwise
STEPS, EVERY = 16, 4  # of a run, and between two checkpoints

# Settings of attach by name: each has other code on the way.
RUNS: dict[str, dict[str, Any]] = {
    "direct": {"density": 0.1, "dense_below": 0},
    "direct, groups": {"density": 0.1, "dense_below": 0, "groups": 1000},
    "direct, exdyna": {"density": 0.1, "dense_below": 0, "method": "exdyna"},
    "gloo": {"density": 0.1, "dense_below": 0, "transport": "torch"},
    "dense groups": {"density": 0.1, "dense_below": 100_000, "groups": 1000},
    "local updates": {"density": 0.1, "dense_below": 0, "update": "local"},
}
GOING_ON = {"density": 0.1, "dense_below": 0, "update": "local", "on_loss": "continue"}
MERGED = {"density": 0.1, "dense_below": 0, "merge": "omgs"}


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    what     "kill", "stop", "raise", "memory", "disk", at a place of the rank's own; "link" and "file", from outside;
             "command", of `spardl train` itself; "lose", a kill after which the others go on
    places   where
    victims  how many ranks
    harmless whether the run must come to its end all the same, with the same weights
    lasts    for which share of the timeout a rank is stopped, or a line is down or slow
    rate     of a line that is slow instead of down
    bought   seconds more that an error may take: a round may take one more for each KiB that still gets through
    """

    name: str
    what: str
    places: tuple[str, ...] = ("round",)
    victims: int = 1
    harmless: bool = False
    lasts: float = 0.0
    rate: str = ""
    bought: float = 0.0
    weight: int = 1


SHORT, LONG = 0.4, 2.5

KINDS = (
    Kind("kill -9 at the meeting", "kill", ("rendezvous", "attach"), weight=2),
    Kind("kill -9 in a step", "kill", ("forward", "hook", "step"), weight=2),
    Kind("kill -9 in a round", "kill", weight=3),
    Kind("kill -9 in a commit", "kill", ("commit",)),
    Kind("kill -9 while saving", "kill", ("save",)),
    Kind("kill -9 while layers are merged", "kill", ("probe",)),
    Kind("kill -9 of two ranks", "kill", ("round", "forward", "step"), victims=2, weight=2),
    Kind("stopped for less than the timeout", "stop", ("round", "forward", "step"), harmless=True, lasts=SHORT),
    Kind("stopped for longer, in a round", "stop", lasts=LONG, weight=3),
    Kind("stopped for longer, in a step", "stop", ("forward", "hook", "step"), lasts=LONG, weight=2),
    Kind("stopped for longer, at the meeting", "stop", ("rendezvous", "attach"), lasts=LONG, weight=2),
    Kind("two ranks stopped", "stop", ("round", "step"), victims=2, lasts=LONG),
    Kind("exception in forward, a hook or the data", "raise", ("forward", "hook", "step"), weight=2),
    Kind("out of memory", "memory", ("forward",)),
    Kind("disk full while saving", "disk", ("writing",)),
    Kind("checkpoint of another rank, of another world, or damaged", "file", ("swapped", "foreign", "not finite")),
    Kind("the wall clock jumps", "clock", ("step",), harmless=True),
    Kind("line down, and up in time", "link", ("step",), harmless=True, lasts=SHORT),
    Kind("line down", "link", ("step",), lasts=LONG, weight=2),
    Kind("line at a crawl", "link", ("step",), lasts=LONG, rate="2kbit", bought=3.0),
    Kind("kill -9, and the others go on", "lose", ("round", "step", "commit"), weight=2),
    Kind("kill -9 of two ranks, and the others go on", "lose", ("round", "step", "commit"), victims=2),
    Kind("spardl train: launcher or rank killed", "command", ("launcher", "rank"), weight=2),
    Kind("spardl train: disk full, or checkpoint damaged", "command", ("disk", "checkpoint"), weight=2),
)


@dataclass(frozen=True)
class Trial:
    """Everything that decides it."""

    seed: int
    kind: str
    workers: int
    run: str
    place: str
    victims: tuple[int, ...]
    step: int
    operation: int
    timeout: float
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def fault(self) -> Kind:
        return next(kind for kind in KINDS if kind.name == self.kind)


def trial_of(seed: int, kinds: tuple[Kind, ...] = KINDS, timeout: float = TIMEOUT_S) -> Trial:
    """The trial of this seed."""
    chance = random.Random(seed)
    kind = chance.choices(kinds, [each.weight for each in kinds])[0]
    workers, place = chance.choice((3, 4)), chance.choice(kind.places)
    run = chance.choice(list(RUNS))
    if place in ("hook", "probe", "not finite"):
        run = "merged" if place == "probe" else "direct"
    if kind.what == "lose":
        run = "going on"
    settings = {"merged": MERGED, "going on": GOING_ON}.get(run) or RUNS[run]
    saves = range(2 * EVERY - 1, STEPS - 1, EVERY)
    step = chance.choice(saves) if place in ("save", "writing") else chance.randrange(EVERY + 1, STEPS - 1)
    return Trial(
        seed=seed,
        kind=kind.name,
        workers=workers,
        run=run,
        place=place,
        victims=tuple(sorted(chance.sample(range(workers), kind.victims))),
        step=step,
        operation=chance.randrange(2),
        timeout=timeout,
        settings=settings,
    )
