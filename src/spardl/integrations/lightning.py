"""Lightning: one callback.

    trainer = Trainer(strategy="ddp", callbacks=[SparseSync(density=0.01)])

The module, its optimizers and `trainer.fit` stay as they are. Lightning's own checkpoints carry every rank's state.
"""

import contextlib
import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from spardl.errors import ConfigError, SparDLWarning
from spardl.extras import require
from spardl.integrations.attach import attach
from spardl.integrations.figures import figures
from spardl.integrations.handle import SyncHandle
from spardl.integrations.local import LocalSync
from spardl.update import LocalUpdates

require("lightning", "spardl.integrations.lightning needs Lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

IN_PARTS = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class SparseSync(Callback):
    """Synchronises what `fit` trains, sparsely, under `Trainer(strategy="ddp")`.

    It attaches when optimizers exist and before Lightning loads them, so that a resumed run goes on exactly. With local
    updates, validation and the weights in checkpoints are the shared ones, and after `fit` all ranks hold the same
    model. A checkpoint holds all ranks' states, gathered: every rank sends its own to all others when one is saved.

    Args:
        density: share of entries that an exchange may send.
        update: "local" (default) or "gradients", as for `spardl.attach`.
        settings: what else `spardl.attach` takes.

    Attributes:
        sync: the handle, from the start of `fit` until the next `fit`.
    """

    def __init__(self, *, density: Any = 0.01, update: str | LocalUpdates = "local", **settings: Any) -> None:
        self.sync: SyncHandle | None = None
        self._settings = {"density": density, "update": update, **settings}
        self._loaded: Mapping[str, Any] | None = None  # from a checkpoint, until training starts
        self._shown = contextlib.ExitStack()  # shared weights, while validation sees them
        self._failed = False

    # --- the life of a fit ------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(_refusal(type(trainer.strategy).__name__))
        if self.sync is not None:
            self.sync.detach()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.sync = attach(model, optimizer=trainer.optimizers, scaler=scaler, **self._settings)
        self._failed = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Last of all that is loaded: with local updates it holds each rank's own weights and optimizers."""
        if self.sync is not None and self._loaded is not None:
            self.sync.load_state_dict(self._loaded)
        self._loaded = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        every = trainer.log_every_n_steps  # 0 if nothing is to be logged
        if self.sync is not None and every and trainer.global_step % every == 0:
            self.log_dict(figures(self.sync), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.sync is not None:
            self.sync.flush()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._shown.close()
        self._failed = True

    # --- shared weights ---------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.sync is not None:
            self._shown.enter_context(self.sync.shared())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._shown.close()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states; Lightning asks every rank for it, and writes what rank 0 has."""
        if self.sync is None:
            return {}
        if self._failed:  # other ranks may be gone, or have not failed
            warnings.warn(
                "A checkpoint saved after an error has no state of spardl in it.", SparDLWarning, stacklevel=2
            )
            return {}
        return self.sync.gathered_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whoever loads the file as a model gets the weights that all ranks share."""
        if isinstance(self.sync, LocalSync) and trainer.is_global_zero:
            with self.sync.shared():
                checkpoint["state_dict"] = copy.deepcopy(trainer.strategy.lightning_module_state_dict())


def _refusal(strategy: str) -> str:
    what = f"SparseSync works under DDP, and this trainer has {strategy}"
    ddp = 'give it Trainer(strategy="ddp", devices=...) with two processes or more'
    if strategy not in IN_PARTS:
        return f"{what}; {ddp}."
    return (
        f"{what}, which cuts up what is synchronised here. If a device holds the whole model, {ddp}; else use FSDP2"
        " between replicas, in a loop of your own, with Accelerate or with the Hugging Face Trainer"
        " (docs/frameworks/fsdp.md)."
    )
