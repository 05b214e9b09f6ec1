"""SparseSyncCallback under transformers.Trainer: a tiny GPT that learns to count, saved and resumed by the Trainer."""

import importlib
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spardl
from frameworks import EXACT, WAYS, as_on_devices, as_torchrun, needs, optimizer_for, scaler_for
from training import all_equal, weights_of

pytestmark = needs("transformers")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Once, for all processes that are forked from this one."""
    importlib.import_module("spardl.integrations.hf")


def tiny() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=24, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def counting(count: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = [torch.arange(start, start + 12) % 24 for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, precision: str = "fp32", **how: Any) -> Any:
    from transformers import TrainingArguments

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=spardl.SparDLWarning)
    usual: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "logging_steps": 4}
    usual |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    usual |= {"per_device_train_batch_size": 4, "max_steps": 12, "data_seed": 3, "dataloader_pin_memory": False}
    usual |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    return TrainingArguments(output_dir=str(folder), **{**usual, **how})


def parts(folder: Path, update: str, optimizer: str, precision: str = "fp32", **how: Any) -> tuple[Any, Any]:
    """A trainer, and our callback."""
    from transformers import Trainer

    from spardl.integrations.hf import SparseSyncCallback

    args = arguments(folder, precision, **how)
    model = tiny()
    made = optimizer_for(model, optimizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=counting(),
        eval_dataset=counting(8),
        optimizers=(made, torch.optim.lr_scheduler.StepLR(made, 4, gamma=0.9)),
    )
    if precision == "fp16":  # as on a GPU
        trainer.accelerator.native_amp, trainer.accelerator.scaler = True, scaler_for(update, args.process_index)
    callback = SparseSyncCallback(trainer, update=update, **EXACT)
    trainer.add_callback(callback)
    return trainer, callback


def _resume(rank: int, workers: int, update: str, optimizer: str, precision: str, folder: Path) -> tuple[Any, ...]:
    saving = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    trainer, callback = parts(folder, update, optimizer, precision, **saving)
    trainer.train()
    scaler, skipped = trainer.accelerator.scaler, callback.sync.stats().total.skipped
    whole = weights_of(trainer.model)
    before, *_, after = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    logged = {key for record in trainer.state.log_history for key in record}

    trainer, _ = parts(folder, update, optimizer, precision, **saving)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    if precision == "fp16":
        assert scaler.state_dict() == trainer.accelerator.scaler.state_dict()
    return whole, weights_of(trainer.model), before, after, "spardl/bytes_per_step" in logged, skipped


@pytest.mark.parametrize(("update", "optimizer", "precision"), WAYS)
def test_a_run_resumed_from_the_trainers_checkpoint_equals_one_that_did_not_stop(
    update: str, optimizer: str, precision: str, tmp_path: Path
) -> None:
    """Bit for bit on every rank, with accumulation, clipping and evaluation in between; and it learns.

    A scaler that finds its scale too large skips the same steps on all ranks where gradients are synchronised.
    """
    ranks = as_torchrun(2, _resume, update, optimizer, precision, tmp_path)
    for whole, resumed, before, after, logged, skipped in ranks:
        assert torch.equal(whole, resumed)
        assert after < before
        assert logged
        assert bool(skipped) == ((update, precision) == ("gradients", "fp16"))
    assert all_equal(whole for whole, *_ in ranks)


def _look(rank: int, workers: int, folder: Path) -> tuple[Any, ...]:
    from transformers import TrainerCallback

    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first
    every = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    trainer, _ = parts(folder, "local", "adamw", "bf16", **best, **every)
    seen: dict[str, list[torch.Tensor]] = {"evaluated": [], "own": []}

    class Look(TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            seen["evaluated"].append(weights_of(trainer.model).clone())

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            seen["own"].append(weights_of(trainer.model).clone())

    trainer.add_callback(Look())
    trainer.train()
    files = [folder / f"checkpoint-{step}" / "model.safetensors" for step in (4, 8, 12)]
    return seen["own"][6], seen["evaluated"], weights_of(trainer.model), files


def test_evaluation_and_files_have_shared_weights_and_the_best_model_is_the_last(tmp_path: Path) -> None:
    """Ranks' own weights differ while they train; what they evaluate and save is what they share; the model that the
    Trainer loads in the end is the one that all ranks keep."""
    from transformers import GPT2LMHeadModel

    ranks = as_torchrun(2, _look, tmp_path)
    assert not all_equal(own for own, _, _, _ in ranks)
    for step in range(3):
        assert all_equal(evaluated[step] for _, evaluated, _, _ in ranks)
        saved = weights_of(GPT2LMHeadModel.from_pretrained(ranks[0][3][step].parent))
        assert torch.equal(saved, ranks[0][1][step])
    for _, evaluated, final, _ in ranks:
        assert any(torch.equal(final, each) for each in evaluated[:2])


def _elsewhere(rank: int, workers: int, folder: Path) -> tuple[str, torch.Tensor]:
    trainer, callback = parts(folder / "first", "local", "sgd", save_strategy="steps", save_steps=4, max_steps=4)
    trainer.train()
    torch.distributed.barrier()
    told = ""
    for given in (None, folder / "first" / "checkpoint-4"):
        trainer, callback = parts(folder / "second", "local", "sgd", max_steps=6)
        callback._resume_from = given
        try:
            trainer.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-4"))
        except spardl.CheckpointError as error:
            told = str(error)
    return told, weights_of(trainer.model)


@pytest.mark.slow
def test_a_checkpoint_from_elsewhere_has_to_be_named(tmp_path: Path) -> None:
    ranks = as_torchrun(2, _elsewhere, tmp_path)
    assert all("resume_from=" in told for told, _ in ranks)
    assert all_equal(weights for _, weights in ranks)


def _evaluated_first(rank: int, workers: int, folder: Path) -> str:
    trainer, _ = parts(folder, "local", "sgd")
    trainer.evaluate()
    try:
        trainer.train()
    except spardl.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_trainer_that_has_lost_ddp_is_refused(tmp_path: Path) -> None:
    """`evaluate()` before `train()` prepares the model without DDP, and `train()` then leaves it so."""
    assert all("evaluate() before train()" in told for told in as_torchrun(2, _evaluated_first, tmp_path))


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _in_parts(rank: int, workers: int, update: str, optimizer: str, folder: Path) -> tuple[Any, ...]:
    """Two replicas in two parts each, whole and resumed. (Accelerate knows no replicas in one part.)"""
    from accelerate.state import AcceleratorState
    from transformers import Trainer

    from spardl.integrations.hf import SparseSyncCallback
    from spardl.integrations.hybrid import SparseReplicas

    as_on_devices()
    every = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    kinds = {"adamw": (torch.optim.AdamW, {"lr": 1e-2}), "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    found = []
    for resumed in (None, str(folder / "checkpoint-5")):
        AcceleratorState._reset_state(True)
        replicas = SparseReplicas(dp_replicate_size=2, dp_shard_size=2)
        args = arguments(folder, fsdp=True, fsdp_config=wrap, parallelism_config=replicas, **every)
        data = {"train_dataset": counting(), "eval_dataset": counting(8)}
        trainer = Trainer(model=tiny(), args=args, optimizer_cls_and_kwargs=kinds[optimizer], **data)
        callback = SparseSyncCallback(trainer, update=update, **EXACT)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resumed)
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        found.append(torch.cat([each.full_tensor().detach().flatten() for each in trainer.model.parameters()]))
    mesh = next(iter(trainer.model.parameters())).device_mesh
    return *found, losses, mesh.ndim, callback.sync.session.transport.workers, callback.sync.stats().total.density


@pytest.mark.slow  # test_accelerate.py has FSDP2 between replicas too
@pytest.mark.parametrize(("update", "optimizer"), [("local", "adamw"), ("gradients", "sgd"), ("gradients", "adamw")])
def test_fsdp2_is_dense_within_replicas_and_sparse_between_them_and_resumes_exactly(
    update: str, optimizer: str, tmp_path: Path
) -> None:
    """All ranks end with one model, the same whether the run was stopped or not."""
    ranks = as_torchrun(4, _in_parts, update, optimizer, tmp_path)
    assert all_equal(whole for whole, *_ in ranks)
    for whole, resumed, losses, dimensions, replicas, density in ranks:
        assert torch.equal(whole, resumed)
        assert losses[-1] < losses[0]
        assert (dimensions, replicas) == (1, 2) and density < 0.1


def test_fsdp2_without_replicas_of_ours_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import ParallelismConfig

    from spardl.integrations import hybrid

    monkeypatch.setattr(hybrid, "is_fsdp", lambda module: True)
    both = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)
    for config, told in (
        (both, r"SparseReplicas\(dp_replicate_size=2, dp_shard_size=3\)"),
        (None, "over all 6 processes"),
    ):
        prepared = SimpleNamespace(parallelism_config=config, num_processes=6)
        with pytest.raises(spardl.ConfigError, match=told):
            hybrid.replicas_of(prepared, torch.nn.Linear(2, 2))
