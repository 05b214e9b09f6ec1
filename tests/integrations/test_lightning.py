"""SparseSync under Lightning's own Trainer: it learns, saves, resumes exactly, and validates what all ranks share."""

import importlib
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import spardl
from frameworks import EXACT, WAYS, Samples, as_torchrun, loss_on, needs, optimizer_for, scaler_for, start_loss
from training import all_equal, mlp, weights_of

pytestmark = needs("lightning")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Once, for all processes that are forked from this one."""
    importlib.import_module("spardl.integrations.lightning")


def parts(update: str, optimizer: str, epochs: int, **how: Any) -> tuple[Any, Any, Any]:
    """A module, a trainer and our callback."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from spardl.integrations.lightning import SparseSync

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=spardl.SparDLWarning)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.validated: list[torch.Tensor] = []

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers(inputs)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def on_validation_start(self) -> None:
            self.validated.append(weights_of(self).clone())

        def configure_optimizers(self) -> Any:
            made = optimizer_for(self.layers, optimizer)
            return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.8)]

    sync = SparseSync(update=update, **EXACT)
    settings: dict[str, Any] = {"max_epochs": epochs, "logger": False, "enable_checkpointing": False, **how}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 2}
    callbacks: list[Callback] = [sync, *settings.pop("callbacks", [])]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        plugins=[TorchElasticEnvironment(), *settings.pop("plugins", [])],
        callbacks=callbacks,
        **quiet,
        **settings,
    )
    return Module(), trainer, sync


def data() -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


# --- resuming ---------------------------------------------------------------------------------------------------------


def half(update: str, rank: int) -> dict[str, Any]:
    """What Trainer(precision="16-mixed") makes for a GPU, for a CPU."""
    from lightning.pytorch.plugins import MixedPrecision

    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler_for(update, rank))]}


def _resume(rank: int, workers: int, update: str, optimizer: str, precision: str, folder: Path) -> tuple[Any, ...]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(epochs: int, resume_from: Path | None = None, **more: Any) -> tuple[Any, Any]:
        how: dict[str, Any] = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, **more}
        how |= half(update, rank) if precision == "fp16" else {"precision": {"bf16": "bf16-mixed"}.get(precision)}
        module, trainer, sync = parts(update, optimizer, epochs, **how)
        trainer.fit(module, data(), data(), ckpt_path=resume_from, weights_only=True)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return module, (sync.sync.stats().total.skipped, None if scaler is None else scaler.state_dict())

    module, (skipped, scaler) = fit(4)
    whole = weights_of(module)
    fit(2, callbacks=[ModelCheckpoint(dirpath=folder, filename="half", save_top_k=-1)], enable_checkpointing=True)
    module, (_, resumed_scaler) = fit(4, folder / "half.ckpt")
    assert scaler == resumed_scaler
    return whole, weights_of(module), loss_on(module, Samples()), skipped


@pytest.mark.parametrize(("update", "optimizer", "precision"), WAYS)
def test_a_run_resumed_from_lightnings_checkpoint_equals_one_that_did_not_stop(
    update: str, optimizer: str, precision: str, tmp_path: Path
) -> None:
    """Bit for bit on every rank, with accumulation, clipping, a schedule and validation in between; and it learns.

    A scaler that finds its scale too large skips the same steps on all ranks where gradients are synchronised.
    """
    ranks = as_torchrun(2, _resume, update, optimizer, precision, tmp_path)
    for whole, resumed, loss, skipped in ranks:
        assert torch.equal(whole, resumed)
        assert loss < start_loss()
        assert bool(skipped) == ((update, precision) == ("gradients", "fp16"))
    assert all_equal(whole for whole, _, _, _ in ranks)


# --- shared weights ---------------------------------------------------------------------------------------------------


def _look(rank: int, workers: int, folder: Path) -> tuple[Any, ...]:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, name="logs", version="") if rank == 0 else True
    module, trainer, _ = parts("local", "adamw", 1, logger=logger, precision="bf16-mixed", default_root_dir=folder)
    own: list[torch.Tensor] = []
    module.on_train_epoch_end = lambda: own.append(weights_of(module).clone())
    trainer.fit(module, data(), data())
    path = folder / "after.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    trainer.validate(module, data(), verbose=False)
    weights = torch.cat([each.flatten() for each in saved["state_dict"].values()])
    ranks = len(saved["callbacks"]["SparseSync"]["ranks"])
    return own[0], module.validated[1], weights_of(module), weights, ranks


def test_validation_sees_shared_weights_and_training_ends_with_one_model(tmp_path: Path) -> None:
    """Ranks' own weights differ, what they validate does not; files hold all ranks' states, and loggers our numbers."""
    ranks = as_torchrun(2, _look, tmp_path)
    assert not all_equal(own for own, _, _, _, _ in ranks)
    assert all_equal(validated for _, validated, _, _, _ in ranks)
    for _, _, final, saved, states in ranks:
        assert torch.equal(final, ranks[0][2])
        assert torch.equal(final, saved)
        assert states == 2
    logged = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()[0]
    assert "spardl/bytes_per_step" in logged


def _checkpointed(rank: int, workers: int, folder: Path) -> tuple[Any, ...]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(dirpath=folder, filename="step", every_n_train_steps=4, save_on_train_epoch_end=False)
    module, trainer, sync = parts("local", "sgd", 1, callbacks=[saves], enable_checkpointing=True)
    shared: dict[int, torch.Tensor] = {}

    def note(*_: Any) -> None:
        with sync.sync.shared():
            shared[trainer.global_step] = weights_of(module).clone()

    module.on_train_batch_end = note
    trainer.fit(module, data())
    saved = torch.load(folder / "step.ckpt", weights_only=True)
    weights = torch.cat([each.flatten() for each in saved["state_dict"].values()])
    return torch.equal(weights, shared[4]), trainer.global_step


def test_the_model_in_a_checkpoint_has_the_shared_weights(tmp_path: Path) -> None:
    """So that `load_from_checkpoint` gives what all ranks agree on, not what rank 0 holds."""
    for same, steps in as_torchrun(2, _checkpointed, tmp_path):
        assert same
        assert steps == 6


# --- other ways to use it ---------------------------------------------------------------------------------------------


def _twice(rank: int, workers: int) -> torch.Tensor:
    module, trainer, _ = parts("gradients", "sgd", 1)
    trainer.fit(module, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    return weights_of(module)


@pytest.mark.slow
def test_the_same_trainer_fits_twice() -> None:
    """The second fit wraps and optimizes anew, and so does the callback."""
    assert all_equal(as_torchrun(2, _twice))


def _alone(rank: int, workers: int) -> str:
    module, _, sync = parts("local", "sgd", 1)
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[sync], logger=False, barebones=True)
    try:
        trainer.fit(module, data())
    except spardl.ConfigError as error:
        return str(error)
    return ""


def test_one_process_alone_is_told_what_to_do() -> None:
    (told,) = as_torchrun(1, _alone)
    assert 'strategy="ddp"' in told


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_a_strategy_that_cuts_models_up_is_refused_with_what_to_do_instead(name: str) -> None:
    """As `fit` would ask: before the first step."""
    from lightning.pytorch import strategies

    from spardl.integrations.lightning import SparseSync

    trainer = SimpleNamespace(strategy=getattr(strategies, name)())
    with pytest.raises(spardl.ConfigError, match=f"this trainer has {name}, .* use FSDP2 between replicas"):
        SparseSync().on_fit_start(trainer, None)
