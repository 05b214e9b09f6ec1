"""Who may be told of steps: a dashboard, TensorBoard, or anything that takes a dictionary. For `sync.observe(...)`."""

import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from spardl.dashboard.server import Dashboard
from spardl.errors import StateError
from spardl.metrics import StepEvent
from spardl.transport.inquiry import MOST
from spardl.transport.watch import Watch
from spardl.transport.words import Answer, Silence

if TYPE_CHECKING:
    from spardl.integrations.handle import SyncHandle
    from spardl.sync.worker import Worker

GROUPS_EVERY_S = 0.5  # seconds from one look at all groups to the next
FEW = 8  # groups that are looked at after every step


class Writer(Protocol):
    """What torch's and tensorboardX's SummaryWriter have in common."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def as_values(event: StepEvent) -> dict[str, float]:
    """A step's figures, under the names that loggers show them by."""
    return {
        "spardl/exchange_seconds": event.seconds,
        "spardl/bytes_sent": event.bytes_sent,
        "spardl/density": event.density,
        "spardl/counted": float(event.counted),
    }


class TensorBoard:
    """Writes each step's figures: `sync.observe(TensorBoard(SummaryWriter("runs/a")))`.

    Args:
        writer: a SummaryWriter; the caller closes it.
        every: steps from one writing to the next.
    """

    def __init__(self, writer: Writer, every: int = 1) -> None:
        self._writer, self._every = writer, every

    def __call__(self, event: StepEvent) -> None:
        if event.step % self._every == 0:
            for name, value in as_values(event).items():
                self._writer.add_scalar(name, value, event.step)


class Logged:
    """Hands each step's figures to a function that takes a dictionary, such as `run.log` of Weights & Biases.

    The number of the step is among them (`spardl/step`), since such a function counts calls of its own.
    """

    def __init__(self, log: Callable[[Mapping[str, float]], Any], every: int = 1) -> None:
        self._log, self._every = log, every

    def __call__(self, event: StepEvent) -> None:
        if event.step % self._every == 0:
            self._log({"spardl/step": event.step, **as_values(event)})


def connect(board: Dashboard, sync: "SyncHandle") -> None:
    """Tell a dashboard of every step of this synchronisation, and how its groups stand."""
    session, waited, looked = sync.session, sync.session.seconds_exposed, 0.0
    worker = weakref.ref(session.worker)

    def observe(event: StepEvent) -> None:  # on the communication thread, so that groups hold still
        nonlocal looked, waited
        board.history.step(event)
        if session.seconds_exposed:
            board.history.log(event.step, {"exposed seconds": session.seconds_exposed - waited})
            waited = session.seconds_exposed
        if event.groups <= FEW or event.step == 0 or time.monotonic() - looked > GROUPS_EVERY_S:
            looked = time.monotonic()
            board.history.groups([group.to_dict() for group in session.sync.stats().groups])

    sync.observe(observe)
    board.history.ask_for_failure(lambda: None if (alive := worker()) is None else alive.failure)
    watch = getattr(session.transport, "watch", None)
    if isinstance(watch, Watch):
        board.history.ask_ranks_by(partial(standings, weakref.ref(watch), worker))


def standings(watch: "weakref.ref[Watch]", worker: "weakref.ref[Worker]") -> list[tuple[str, str]] | None:
    """What each rank says that it is doing; None once the session has ended, when ranks may go as they like."""
    asking, alive = watch(), worker()
    if asking is None or alive is None or isinstance(alive.failure, StateError):
        return None
    others = [rank for rank in range(asking.size) if rank != asking.rank]
    answers: dict[int, Answer] = {asking.rank: asking.standing(), **asking.ask(others[:MOST])}
    return [in_words(answers.get(rank, Silence.UNKNOWN)) for rank in range(asking.size)]


def in_words(answer: Answer) -> tuple[str, str]:
    """A rank's state, for its colour, and a few words that follow its name."""
    if isinstance(answer, Silence):
        return "unknown" if answer is Silence.UNKNOWN else "bad", answer.value
    if answer.blames is not None:
        return "bad", f"has left because of rank {answer.blames}"
    if answer.waits_for:
        names = ", ".join(str(rank) for rank in answer.waits_for[:4]) + (" ..." if len(answer.waits_for) > 4 else "")
        return "waits", f"has waited {answer.seconds:.1f} s for {names}"
    return "fine", "computes"


def dashboard_of(sync: "SyncHandle", port: int) -> Dashboard:
    """A dashboard that is served and connected."""
    config, workers = sync.config, sync.session.transport.workers
    facts = {"method": config.method, "values": config.values, "groups": str(len(sync.plan))}
    board = Dashboard(f"spardl, rank {sync.session.transport.rank} of {workers}", workers=workers, facts=facts)
    connect(board, sync)
    board.serve(port)
    return board
