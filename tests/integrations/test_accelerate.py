"""Accelerate: one line after `prepare`, and the accelerator's own accumulation, clipping and checkpoints."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import spardl
from frameworks import (
    EXACT,
    WAYS,
    Samples,
    as_on_devices,
    as_torchrun,
    loss_on,
    needs,
    optimizer_for,
    scaler_for,
    start_loss,
)
from training import all_equal, mlp, weights_of

pytestmark = needs("accelerate")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Once, for all processes that are forked from this one."""
    importlib.import_module("spardl.integrations.accelerate")


class Run:
    """A loop as Accelerate's users write it."""

    def __init__(self, update: str, optimizer: str, precision: str = "fp32", **how: Any) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, set_seed

        from spardl.integrations.accelerate import attach

        warnings.filterwarnings("ignore", category=spardl.SparDLWarning)
        set_seed(1)
        order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
        mixed = "no" if precision == "fp32" else precision
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, dataloader_config=order, mixed_precision=mixed, **how
        )
        if precision == "fp16":  # as on a GPU
            accelerator.native_amp, accelerator.scaler = True, scaler_for(update, accelerator.process_index)
        self.accelerator = accelerator
        model = mlp()
        plain = optimizer_for(model, optimizer)
        loader = DataLoader(Samples(), batch_size=8, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 4, gamma=0.8)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, plain, loader, schedule
        )
        assert self.optimizer.scaler is accelerator.scaler
        self.sync = attach(self.accelerator, self.model, self.optimizer, update=update, **EXACT)

    def train(self, *epochs: int) -> None:
        for epoch in epochs:
            self.loader.set_epoch(epoch)
            for inputs, labels in self.loader:
                with self.accelerator.accumulate(self.model), self.accelerator.autocast():
                    loss = cross_entropy(self.model(inputs), labels)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()


def _resume(rank: int, workers: int, update: str, optimizer: str, precision: str, folder: Path) -> tuple[Any, ...]:
    whole = Run(update, optimizer, precision)
    whole.train(0, 1)
    whole.accelerator.save_state(folder)
    with whole.sync.shared():
        shared = weights_of(whole.model)
    whole.accelerator.wait_for_everyone()
    whole.train(2, 3)
    whole.sync.flush()

    resumed = Run(update, optimizer, precision)
    resumed.train(7)  # whatever was there before is forgotten
    resumed.accelerator.load_state(folder)
    resumed.train(2, 3)
    resumed.sync.flush()
    if precision == "fp16":
        assert whole.accelerator.scaler.state_dict() == resumed.accelerator.scaler.state_dict()
    skipped = whole.sync.stats().total.skipped
    return weights_of(whole.model), weights_of(resumed.model), loss_of(whole), shared, skipped


def loss_of(run: Run) -> float:
    with run.accelerator.autocast():
        return loss_on(run.model.module, Samples())


@pytest.mark.parametrize(("update", "optimizer", "precision"), WAYS)
def test_a_run_resumed_by_load_state_equals_one_that_did_not_stop(
    update: str, optimizer: str, precision: str, tmp_path: Path
) -> None:
    """Bit for bit on every rank, with `accumulate` and clipping; the model's file has the shared weights.

    A scaler that finds its scale too large skips the same steps on all ranks where gradients are synchronised.
    """
    from safetensors.torch import load_file

    ranks = as_torchrun(2, _resume, update, optimizer, precision, tmp_path)
    saved = torch.cat([each.flatten() for each in _in_order(load_file(tmp_path / "model.safetensors"))])
    for whole, resumed, loss, shared, skipped in ranks:
        assert torch.equal(whole, resumed)
        assert torch.equal(shared, saved)
        assert loss < start_loss()
        assert bool(skipped) == ((update, precision) == ("gradients", "fp16"))
    assert all_equal(whole for whole, *_ in ranks)


def _in_order(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [next(state[key] for key in state if key.endswith(name)) for name, _ in mlp().named_parameters()]


def _two_models(rank: int, workers: int, folder: Path) -> list[bool]:
    from accelerate import Accelerator

    from spardl.integrations.accelerate import attach

    warnings.filterwarnings("ignore", category=spardl.SparDLWarning)
    accelerator = Accelerator(cpu=True)
    pairs = [accelerator.prepare(model, optimizer_for(model, "sgd")) for model in (mlp(0), mlp(1))]
    syncs = [attach(accelerator, model, optimizer, **EXACT) for model, optimizer in pairs]
    samples = Samples(8 + 8 * rank)

    def step() -> None:
        for model, optimizer in pairs:
            accelerator.backward(cross_entropy(model(samples.inputs), samples.labels))
            optimizer.step()
            optimizer.zero_grad()

    step()
    saved = [weights_of(model) for model, _ in pairs]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    step()
    accelerator.load_state(folder)
    assert len(syncs) == 2
    return [torch.equal(weights, weights_of(model)) for weights, (model, _) in zip(saved, pairs, strict=True)]


def test_two_models_are_saved_beside_each_other(tmp_path: Path) -> None:
    """As a GAN has them: each gets its own state back, on every rank."""
    assert as_torchrun(2, _two_models, tmp_path) == [[True, True], [True, True]]
    names = sorted(path.name for path in tmp_path.glob("spardl*"))
    expected = [f"spardl{which}-0000{rank}-of-00002.pt" for which in ("", "-model-1") for rank in (0, 1)]
    assert names == sorted(expected)


def _unprepared(rank: int, workers: int) -> str:
    from accelerate import Accelerator

    from spardl.integrations.accelerate import attach

    model = mlp()
    try:
        attach(Accelerator(cpu=True), model, optimizer_for(model, "sgd"))
    except spardl.ConfigError as error:
        return str(error)
    return ""


def test_a_model_that_was_not_prepared_is_refused() -> None:
    assert all("accelerator.prepare()" in told for told in as_torchrun(2, _unprepared))


def _in_parts(rank: int, workers: int, update: str, optimizer: str, folder: Path) -> tuple[Any, ...]:
    """Two replicas in two parts each, whole and resumed."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from spardl.integrations.hybrid import SparseReplicas

    def begin() -> Run:
        AcceleratorState._reset_state(True)
        replicas = SparseReplicas(dp_replicate_size=2, dp_shard_size=2)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        return Run(update, optimizer, fsdp_plugin=plugin, parallelism_config=replicas)

    def weights(run: Run) -> torch.Tensor:
        return torch.cat([each.full_tensor().detach().flatten() for each in run.model.parameters()])

    as_on_devices()
    whole = begin()
    whole.train(0, 1)
    with whole.sync.shared():
        whole.accelerator.save_state(folder)
    whole.accelerator.wait_for_everyone()
    whole.train(2)
    whole.sync.flush()
    resumed = begin()
    resumed.train(7)
    resumed.accelerator.load_state(folder)
    resumed.train(2)
    resumed.sync.flush()
    return weights(whole), weights(resumed), whole.sync.session.transport.workers


@pytest.mark.slow
@pytest.mark.parametrize(("update", "optimizer"), [("local", "adamw"), ("gradients", "sgd")])
def test_fsdp2_between_replicas_is_saved_and_resumed_by_the_accelerator(
    update: str, optimizer: str, tmp_path: Path
) -> None:
    """Bit for bit on every rank, and all of them end with one model."""
    ranks = as_torchrun(4, _in_parts, update, optimizer, tmp_path)
    assert all_equal(whole for whole, *_ in ranks)
    for whole, resumed, replicas in ranks:
        assert torch.equal(whole, resumed) and replicas == 2
