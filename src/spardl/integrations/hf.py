"""Hugging Face Trainer: one line before `train`.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(SparseSyncCallback(trainer, density=0.01))

Accumulation, clipping, mixed precision, evaluation and checkpoints are those of `TrainingArguments`.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.errors import CheckpointError, ConfigError
from spardl.extras import require
from spardl.integrations import rank_files
from spardl.integrations.attach import attach
from spardl.integrations.figures import figures
from spardl.integrations.handle import SyncHandle
from spardl.integrations.parts import is_fsdp
from spardl.update import LocalUpdates

require("transformers", "spardl.integrations.hf needs Transformers")
require("accelerate", "transformers.Trainer needs Accelerate")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402


class SparseSyncCallback(TrainerCallback):
    """Synchronises what this trainer trains, sparsely.

    It attaches when training begins, to the model as DDP or FSDP2 has wrapped it and to the optimizer inside the
    accelerator's. Under FSDP2, `hybrid.SparseReplicas` says which processes are replicas of each other.
    With local updates, evaluation and the model files in checkpoints have the shared weights, and after `train` all
    ranks hold the same model. Each rank writes its state into the checkpoint folder, beside its random state; a run
    that resumes goes on exactly.

    Args:
        trainer: the one that it is added to.
        density: share of entries that an exchange may send.
        update: "local" (default) or "gradients", as for `spardl.attach`.
        resume_from: the folder that training resumes from, if that is not a checkpoint in the output folder.
        settings: what else `spardl.attach` takes.

    Attributes:
        sync: the handle, from the beginning of `train` until the next one.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        density: Any = 0.01,
        update: str | LocalUpdates = "local",
        resume_from: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.sync: SyncHandle | None = None
        self._trainer = trainer
        self._settings = {"density": density, "update": update, **settings}
        self._resume_from = resume_from
        self._shown = contextlib.ExitStack()  # shared weights, while something looks at them between steps

    # --- the life of a training -------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self._trainer.model_wrapped
        where: dict[str, Any] = {}
        if is_fsdp(_torch_private.uncompiled(model)):
            where["replicate"] = _replicas(self._trainer.accelerator, model)
        elif not isinstance(model, DistributedDataParallel):
            workers = dist.get_world_size() if dist.is_initialized() else 1
            raise ConfigError(
                f"SparseSyncCallback works under DDP or FSDP2, and this model is a {type(model).__name__} in a run of"
                f" {workers} process(es); start two or more with torchrun, without DeepSpeed, and no"
                " evaluate() before train(), after which the Trainer does not wrap the model."
            )
        if self.sync is not None:
            self.sync.detach()
        optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        scaler = self._trainer.accelerator.scaler
        self.sync = attach(model, optimizer=optimizer, scaler=scaler, **where, **self._settings)
        if state.global_step:
            rank_files.load(self.sync, self._resumed_folder(args, state))
        self._show(args.eval_on_start)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show(control.should_evaluate or control.should_save)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(control.should_evaluate or control.should_save)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "train_loss" in logs:  # training is over; the best model may be loaded next
            self._show(False)
        elif "loss" in logs and self.sync is not None:
            self._trainer.log(figures(self.sync))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(False)
        if self.sync is not None:
            self.sync.flush()

    def _show(self, shared: bool) -> None:
        """Have the model hold shared weights, or this rank's own. Twice the same is once."""
        self._shown.close()
        if shared and self.sync is not None:
            self._shown.enter_context(self.sync.shared())

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.sync is not None and not args.save_only_model:
            rank_files.save(self.sync, _folder(args, state))

    def _resumed_folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        given = self._resume_from or args.resume_from_checkpoint
        folder = Path(given) if isinstance(given, str | Path) else _folder(args, state)
        if not folder.is_dir():
            raise CheckpointError(
                f"training resumes at step {state.global_step}, and there is no {folder} to take the state of spardl"
                " from; give SparseSyncCallback(trainer, resume_from=...) the folder that train() was given."
            )
        return folder


def _replicas(accelerator: Any, model: nn.Module) -> DeviceMesh | None:
    from spardl.integrations.hybrid import replicas_of  # an older Accelerate, which has no such thing, does without

    return replicas_of(accelerator, model)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
