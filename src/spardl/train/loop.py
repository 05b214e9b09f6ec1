"""The training loop: one recipe, one way to synchronise, on the ranks of an existing process group."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from spardl.config import SyncConfig
from spardl.errors import ConfigError
from spardl.integrations.handle import SyncHandle
from spardl.integrations.rehearsal import Rehearsal, Sequel, rehearse
from spardl.planning.merging import Merging
from spardl.planning.planfile import PlanFile
from spardl.train.evaluation import evaluate
from spardl.train.keeper import Keeper
from spardl.train.optimizer import set_rate
from spardl.train.recipes import Recipe
from spardl.train.recording import GradientRecorder
from spardl.train.report import Observer, Quiet, StepReport, TrainReport
from spardl.train.run import Run
from spardl.train.source import Batch, generator_of
from spardl.update import LocalUpdates


def train(
    recipe: Recipe,
    config: SyncConfig,
    *,
    rule: LocalUpdates | None = None,
    rival: str | None = None,
    plan: PlanFile | None = None,
    chooses: bool = False,
    data_dir: Path | None = None,
    observer: Observer | None = None,
    keeper: Keeper | None = None,
    recorder: GradientRecorder | None = None,
    attached: Callable[[SyncHandle], None] | None = None,
) -> TrainReport:
    """Train from scratch, or from where `keeper` says; every rank calls it and gets the same report, but its own costs.

    Gradients are synchronised, or, with a rule of local updates, weights; a `rival` averages gradients without us. With
    a `plan`, which rule and configuration come from, the model must be the one that it was made for. With `chooses` the
    method is measured, as by `attach(method="auto")`, and two runs may differ.
    `attached` is given what synchronises the model before the first step.

    Deterministic: the same arguments on the same number of ranks give the same weights, also of a run that was stopped
    and went on. Raises `Stopped` when the keeper was asked to stop, and has saved. A `recorder` sees the batches of a
    step first, and changes nothing.
    """
    observer = observer or Quiet()
    run = Run(recipe, config, data_dir, rule=rule, rival=rival, plan=plan, chooses=chooses)
    if attached is not None:
        attached(run.sync)
    if keeper is not None:
        keeper.restore(run)
    observer.begin(run.outline())
    while len(run.history) < run.epochs:
        run.model.train()
        dist.barrier()
        started = time.perf_counter()
        for batches in run.rest_of_epoch():
            if recorder is not None:
                recorder.before_step(run, batches)
            report = train_step(run, batches, started)
            observer.step(report)
            if is_tested_between(run):
                observer.tested(run.note_test(figures_of(run)))
            if keeper is not None:
                keeper.after_step(run)
            started = time.perf_counter()
        if run.step == run.last_step:
            run.finish()
        figures = run.note_test(figures_of(run)).figures if is_tested(run) else {}
        observer.epoch(run.close_epoch(figures))
    return run.report()


def rehearse_recipe(recipe: Recipe, sequel: Sequel | None = None, *, data_dir: Path | None = None) -> Rehearsal:
    """Train a few steps without any exchange, to see what a step computes, then those of the sequel. Collective."""

    def body() -> None:
        run = Run(recipe, None, data_dir)
        run.model.train()
        while len(run.history) < run.epochs:
            for batches in run.rest_of_epoch():
                train_step(run, batches, time.perf_counter())
            run.close_epoch({})

    return rehearse(body, sequel)


def train_until_planned(recipe: Recipe, config: SyncConfig, *, data_dir: Path | None = None) -> Merging:
    """Train only until `config.merge` has measured and planned. Collective; every rank gets the same plan."""
    run = Run(recipe, config, data_dir)
    run.model.train()
    while len(run.history) < run.epochs:
        for batches in run.rest_of_epoch():
            train_step(run, batches, time.perf_counter())
            merging = run.sync.merging
            if merging is not None:
                return merging
        run.close_epoch({})
    raise ConfigError(f"{run.step} steps are too few to plan with; give more data or a smaller batch size.")


def train_step(run: Run, batches: list[Batch], started: float) -> StepReport:
    """One step: each micro-batch forward and backward, gradients synchronised with the last one, then the update.

    With local updates gradients are this rank's own, and weights are exchanged when the optimizer has stepped. A rank
    that is slower than others may leave the step out.
    """
    settings, rate, loss_sum = run.settings, run.rate.at(run.step), 0.0
    if run.sync.rests():
        return run.count_rest(rate, time.perf_counter() - started)
    # What is random in a step depends on its number, so that a run can go on at any.
    torch.manual_seed(generator_of(settings.seed, run.rank, run.step).initial_seed())
    set_rate(run.optimizer, rate)
    run.optimizer.zero_grad()
    for number, batch in enumerate(batches, start=1):
        with run.without_exchange() if number < len(batches) else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.amp == "bf16"):
                loss, run.carried = run.data.task.loss(run.model, batch, run.carried)
            (loss / len(batches)).backward()
        loss_sum += loss.item()
    if run.clip is not None:
        clip_grad_norm_(run.model.parameters(), run.clip)
    run.optimizer.step()
    return run.count_step(loss_sum / len(batches), rate, time.perf_counter() - started)


def figures_of(run: Run) -> dict[str, float]:
    with run.sync.shared():
        return evaluate(run.module, run.data, run.settings.eval_batch, run.settings.loaders)


def is_tested(run: Run) -> bool:
    """Whether the epoch that ends now is followed by a test: by its number or the step's, and always at the end."""
    epoch, every = len(run.history) + 1, run.settings.eval_every
    return epoch == run.epochs or (every > 0 and epoch % every == 0) or is_step_of_a_test(run)


def is_tested_between(run: Run) -> bool:
    """Whether a test comes in the middle of an epoch: every `eval_steps` steps."""
    return run.step < run.end_of_epoch and is_step_of_a_test(run)


def is_step_of_a_test(run: Run) -> bool:
    return run.settings.eval_steps > 0 and run.step % run.settings.eval_steps == 0
