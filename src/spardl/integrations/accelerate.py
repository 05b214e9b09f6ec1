"""Hugging Face Accelerate: one line after `prepare`.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    sync = spardl.integrations.accelerate.attach(accelerator, model, optimizer, density=0.01)

`accumulate`, `clip_grad_norm_`, `save_state` and `load_state` of the accelerator stay as they are.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl import _torch_private
from spardl.errors import ConfigError, StateError
from spardl.extras import require
from spardl.integrations import rank_files
from spardl.integrations.attach import attach as attach_to
from spardl.integrations.handle import SyncHandle
from spardl.integrations.local import LocalSync
from spardl.integrations.model import plain_module
from spardl.integrations.parts import is_fsdp
from spardl.update import LocalUpdates

require("accelerate", "spardl.integrations.accelerate needs Accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    update: str | LocalUpdates = "local",
    **settings: Any,
) -> SyncHandle:
    """Synchronise a prepared model sparsely from now on. Collective: every rank calls it, once, in the same way.

    `accelerator.save_state` then writes each rank's state beside its random state, and the shared weights as the
    model's; `accelerator.load_state` goes on exactly. A model of FSDP2, prepared with a `hybrid.SparseReplicas`, is
    saved before anybody is asked: save it in `with sync.shared():`.

    Args:
        accelerator: the one that has prepared both.
        model: what `prepare` has returned.
        optimizer: what `prepare` has returned, or a list of several.
        update: "local" (default) or "gradients", as for `spardl.attach`.
        settings: what else `spardl.attach` takes.
    """
    where: dict[str, Any] = {}
    if is_fsdp(_torch_private.uncompiled(model)):
        from spardl.integrations.hybrid import replicas_of  # an older Accelerate has no such thing

        where["replicate"] = replicas_of(accelerator, model)
    elif not isinstance(model, DistributedDataParallel) and accelerator.num_processes > 1:
        raise ConfigError(
            f"this model is a {type(model).__name__}, not yet prepared for {accelerator.num_processes} processes; give"
            " what accelerator.prepare() has returned."
        )
    prepared = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    plain = [each.optimizer if isinstance(each, AcceleratedOptimizer) else each for each in prepared]
    sync = attach_to(model, optimizer=plain, update=update, scaler=accelerator.scaler, **where, **settings)
    keep_with(accelerator, model, sync)
    return sync


def keep_with(accelerator: Accelerator, model: nn.Module, sync: SyncHandle) -> None:
    """Have this state saved and loaded with the accelerator's."""
    checkpoint = AcceleratedState(model, sync)
    accelerator.register_save_state_pre_hook(checkpoint.save)
    accelerator.register_load_state_pre_hook(checkpoint.note_folder)
    accelerator.register_for_checkpointing(checkpoint)  # what is registered is loaded after models and optimizers


class AcceleratedState:
    """What the accelerator calls when it saves and loads."""

    def __init__(self, model: nn.Module, sync: SyncHandle) -> None:
        self._model, self._sync = plain_module(model), sync
        self._folder, self._stem = "", ""

    def save(self, models: Sequence[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Before anything is written: this rank's file, and shared weights instead of rank 0's."""
        index = self._index(models)
        rank_files.save(self._sync, folder, _stem(index))
        if isinstance(self._sync, LocalSync) and index < len(weights):
            with self._sync.shared():
                weights[index] = copy.deepcopy(models[index].state_dict())

    def note_folder(self, models: Sequence[nn.Module], folder: str) -> None:
        """Before anything is loaded; of FSDP2, which has one model, Accelerate names none."""
        self._folder, self._stem = folder, _stem(self._index(models) if models else 0)

    def state_dict(self) -> dict[str, Any]:
        """What is in the file that rank 0 writes for all: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After everything else was loaded."""
        rank_files.load(self._sync, self._folder, self._stem)

    def _index(self, models: Sequence[nn.Module]) -> int:
        """Which of the accelerator's models this is."""
        for index, model in enumerate(models):
            if plain_module(model) is self._model:
                return index
        raise StateError("the accelerator has let go of this model (free_memory, clear): prepare and attach it anew.")


def _stem(index: int) -> str:
    return f"{rank_files.STEM}-model-{index}" if index else rank_files.STEM
