"""What a dashboard remembers of a run: some thousand points of each curve, however long the run is."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spardl.errors import StateError
from spardl.metrics import StepEvent
from spardl.version import __version__

MOST = 1000  # points of a curve; beyond, every second one is dropped
ROWS = 100  # groups of a timeline; beyond, the others are not shown
ASK_EVERY_S = 1.0

Standing = tuple[str, str]  # of a rank: "fine", "waits", "bad" or "unknown", and that in words


class Curve:
    """Values over steps. As it grows it keeps every second, every fourth, ... point, and always the last one."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._stride = 1
        self._seen = 0
        self._last: tuple[int, float] | None = None

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self._last = (step, value)
        if self._seen % self._stride == 0:
            self.points.append(self._last)
        self._seen += 1
        if len(self.points) > MOST:
            self.points = self.points[::2]
            self._stride *= 2

    def shown(self) -> list[tuple[int, float]]:
        """The points kept, and the last one."""
        return self.points if self._last in self.points[-1:] else [*self.points, *([self._last] if self._last else [])]


class History:
    """One rank's view of a run. Filled by whoever trains and by the communication thread, read by the server's.

    Args:
        title: of the page.
        workers: of the run.
        facts: settings that are shown, by name.
    """

    def __init__(self, title: str, workers: int, facts: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._head: dict[str, Any] = {}
        self.describe(title, workers, facts)
        self._curves: dict[str, Curve] = {}
        self._groups: list[dict[str, Any]] = []
        self._steps = self._refused = self._bytes = self._dense_bytes = 0
        self._heard: float | None = None
        self._timeline: dict[str, Any] = {}
        self._ask: Callable[[], BaseException | None] = lambda: None
        self._ask_ranks: Callable[[], Sequence[Standing] | None] = lambda: None
        self._ranks: tuple[float, Sequence[Standing] | None] = (
            -math.inf,
            None,
        )  # when they were asked, and what was said

    def describe(self, title: str, workers: int, facts: Mapping[str, str]) -> None:
        """What the run is, once it is known."""
        self._head = {"title": title, "workers": workers, "facts": dict(facts), "version": __version__}

    def step(self, event: StepEvent) -> None:
        """One synchronised step, in which by its nature every rank has taken part."""
        with self._lock:
            self._steps, self._heard = event.step + 1, time.time()
            self._refused += not event.counted
            self._bytes += event.bytes_sent
            self._dense_bytes += 4 * event.elements
            spans = [(each.group, each.begins, each.ends) for each in event.spans[:ROWS]]
            self._timeline = {"step": event.step, "seconds": event.seconds, "spans": spans, "of": len(event.spans)}
            found = {"exchange seconds": event.seconds, "bytes sent": event.bytes_sent, "density": event.density}
            self._add(event.step, found)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a script's own, by name, such as the loss: each becomes a curve."""
        with self._lock:
            self._add(step, values)

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """How groups of parameters stand, as `GroupStats.to_dict` has them."""
        with self._lock:
            self._groups = [dict(group) for group in groups]

    def ask_for_failure(self, ask: Callable[[], BaseException | None]) -> None:
        """Whom to ask whether the run has failed, and why."""
        self._ask = ask

    def ask_ranks_by(self, ask: Callable[[], Sequence[Standing] | None]) -> None:
        """How to find out what each rank is doing, in rank order; None while nobody can tell."""
        self._ask_ranks = ask

    def standings(self) -> Sequence[Standing] | None:
        """What each rank is doing now; asked once per second at most, whoever looks."""
        asked, said = self._ranks
        if time.monotonic() - asked >= ASK_EVERY_S:
            said = self._ask_ranks()
            self._ranks = (time.monotonic(), said)
        return said

    def _failure(self) -> dict[str, Any] | None:
        error = self._ask()
        if error is None or isinstance(error, StateError):  # which is how a session ends
            return None
        return {"text": str(error), "peer": getattr(error, "peer", None)}

    def snapshot(self, *, live: bool = False) -> dict[str, Any]:
        """Plain values, fit for JSON; `live`: with what each rank is doing, which takes up to a second to hear."""
        ranks = self.standings() if live else None
        with self._lock:
            return {
                **self._head,
                "steps": self._steps,
                "refused": self._refused,
                "bytes_sent": self._bytes,
                "dense_bytes": self._dense_bytes,
                "quiet_seconds": None if self._heard is None else time.time() - self._heard,
                "failure": self._failure(),
                "curves": {name: curve.shown() for name, curve in self._curves.items()},
                "groups": self._groups,
                "timeline": self._timeline,
                "ranks": ranks,
            }

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._curves.setdefault(name, Curve()).add(step, float(value))
