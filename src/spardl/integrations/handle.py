"""SyncHandle: what a script keeps of a synchronised model, whatever front end synchronises it."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from spardl.config import SyncConfig
from spardl.errors import StateError
from spardl.integrations.sharded import Layout, Sharded
from spardl.metrics import SyncStats
from spardl.planning.merging import Merging
from spardl.sync.plan import GroupPlan, densely
from spardl.sync.session import Observer, Session

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

    from spardl.dashboard.server import Dashboard


class Uncopied:
    """What copies of a model do not carry along: instead of it they have None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_none, ())


class SyncHandle(Uncopied):
    """Statistics, state and the end of one model's synchronisation. Front ends derive from it."""

    session: Session

    @property
    def config(self) -> SyncConfig:
        """The settings in force."""
        return self.session.config

    @property
    def plan(self) -> list[GroupPlan]:
        """How groups of parameters are synchronised now."""
        return self.session.plan

    def stats(self) -> SyncStats:
        """What was sent and how long it took.

        Returns:
            Per group and in total: entries, bytes, bits per entry, density; seconds selecting, packing, waiting and
            transferring.
        """
        return self.session.stats()

    def observe(self, observer: Observer) -> None:
        """Call `observer` with a `StepEvent` after each step, on the communication thread."""
        self.session.observers.append(observer)

    def dashboard(self, port: int = 0) -> "Dashboard":
        """Show this rank's steps on a live page at 127.0.0.1; one rank is enough, and its `url` says where.

            board = sync.dashboard()
            board.log(step, loss=loss.item())  # curves of your own
            board.export("run.html")  # the page as a file

        Args:
            port: where; default: one that is free.
        """
        from spardl.integrations.observers import dashboard_of

        return dashboard_of(self, port)

    @property
    def merging(self) -> Merging | None:
        """What a merge planner has measured and planned; None if there is none, or not yet."""
        return None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Have the model hold the weights that all ranks share inside this block. With gradients it always does."""
        yield

    def rests(self) -> bool:
        """Whether this rank leaves the step that would begin now out. With gradients none ever does."""
        return False

    def flush(self) -> None:
        """Leave all ranks with the same model. With gradients they have that: only what residuals hold waits."""

    @property
    def weights(self) -> Mapping[str, Parameter]:
        """The parameters that are synchronised, by the names that states have for them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Residuals, velocities and controllers of *this rank*: save one file per rank, beside the model."""
        check_saver()
        self._settle()
        return {**self.session.state_dict(), **self._extras()}

    def sharded(self, checkpoint: "str | PathLike[str] | StorageReader | None" = None, *, key: str = "sync") -> Sharded:
        """This handle for `torch.distributed.checkpoint`, which saves what each rank has in one checkpoint.

            dcp.save({"model": model_state, "sync": sync.sharded()}, checkpoint_id=folder)
            dcp.load({"model": model_state, "sync": sync.sharded(folder)}, checkpoint_id=folder)

        Args:
            checkpoint: the one that will be loaded, which may have had other ranks; default: one of the same ranks.
            key: under which it was saved.
        """
        return Sharded(self, None if checkpoint is None else Layout.saved(checkpoint, key))

    def gathered_state_dict(self) -> dict[str, Any]:
        """All ranks' states as one, the same on every rank, to be saved by any of them. Collective.

        It loads on every rank, also with another number of workers: then each starts from the mean residual.
        """
        self._settle()
        return {**self.session.gathered_state_dict(), **self._extras()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's `state_dict`, or from a gathered one, exactly.

        Raises:
            StateError: it is of another rank, world or model, or damaged; nothing was changed.
        """
        self._settle()
        self.session.load_state_dict(state, regroup=self._regroups(state))
        self._load_extras(state)

    def detach(self) -> None:
        """Stop sparsifying: everything is sent from the next step on. Collective, between steps.

        Nothing is lost. Residuals that hold gradients are sent by the next step. Where momentum was local they hold
        updates, which are applied now, at the present learning rate; momentum and weight decay go back to the
        optimizer, with the mean velocity as its momentum.
        """
        self._settle()
        self._leave()
        self.session.config = replace(self.session.config, density=1.0, merge=None, density_range=None)
        self.session.regroup([densely(plan) for plan in self.session.plan])

    def _leave(self) -> None:
        """Give back what the front end has taken over. Collective."""

    def _settle(self) -> None:
        """Wait until nothing is under way, and take in what front ends hold back between steps."""
        self.session.wait()

    def _extras(self) -> dict[str, Any]:
        """What the front end saves beside the session's state. Plain values, the same on all ranks."""
        return {}

    def _regroups(self, state: Mapping[str, Any]) -> bool:
        """Whether the state's groups are to be taken over."""
        return False

    def _load_extras(self, state: Mapping[str, Any]) -> None:
        """What `_extras` saved."""


def check_saver() -> None:
    """Raise `StateError` if it is `torch.distributed.checkpoint` that wants this rank's state: it takes tensors of the
    same name for the same tensor, and would keep those of one rank."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
        raise StateError(
            "torch.distributed.checkpoint would keep one rank's state for all; give it sync.sharded(), and to load,"
            " sync.sharded(folder)."
        )


def _none() -> None:
    return None
