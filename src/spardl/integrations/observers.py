"""Who may be told of steps: a dashboard, TensorBoard, or anything that takes a dictionary. For `sync.observe(...)`."""

import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from spardl.dashboard.server import Dashboard
from spardl.metrics import StepEvent

if TYPE_CHECKING:
    from spardl.integrations.handle import SyncHandle

GROUPS_EVERY_S = 0.5  # seconds from one look at all groups to the next


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
    session, waited, looked = sync.session, sync.seconds_exposed, 0.0
    worker = weakref.ref(session.worker)

    def observe(event: StepEvent) -> None:  # on the communication thread, so that groups hold still
        nonlocal looked, waited
        board.history.step(event)
        if sync.seconds_exposed:
            board.history.log(event.step, {"exposed seconds": sync.seconds_exposed - waited})
            waited = sync.seconds_exposed
        if event.step == 0 or time.monotonic() - looked > GROUPS_EVERY_S:
            looked = time.monotonic()
            board.history.groups([group.to_dict() for group in session.sync.stats().groups])

    sync.observe(observe)
    board.history.ask_for_failure(lambda: None if (alive := worker()) is None else alive.failure)


def dashboard_of(sync: "SyncHandle", port: int) -> Dashboard:
    """A dashboard that is served and connected."""
    config, workers = sync.config, sync.session.transport.workers
    facts = {"method": config.method, "values": config.values, "groups": str(len(sync.plan))}
    board = Dashboard(f"spardl, rank {sync.session.transport.rank} of {workers}", workers=workers, facts=facts)
    connect(board, sync)
    board.serve(port)
    return board
