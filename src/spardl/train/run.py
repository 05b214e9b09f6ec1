"""A training under way: everything that steps change, where it stands, and how it is taken up again."""

import contextlib
import hashlib
import importlib
import inspect
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl.config import SyncConfig
from spardl.density import DensitySchedule
from spardl.errors import ConfigError, StateError
from spardl.integrations.attach import attach
from spardl.integrations.auto import AUTO, AutoSync
from spardl.integrations.handle import SyncHandle
from spardl.integrations.rehearsal import Idle
from spardl.planning.planfile import PlanFile
from spardl.train.data import DATASETS, load_data
from spardl.train.dataset import DataSet
from spardl.train.evaluation import averaged_statistics
from spardl.train.hooks import Rival, buckets_for
from spardl.train.models import build_model
from spardl.train.optimizer import build_optimizer
from spardl.train.recipes import Recipe
from spardl.train.report import EpochReport, Outline, Reading, StepReport, SyncCosts, TrainReport, way
from spardl.train.schedule import LearningRate
from spardl.train.settings import TrainSettings
from spardl.train.source import Batch, batches
from spardl.train.subset import part_of
from spardl.update import GRADIENTS, LocalUpdates

State = dict[str, Any]

UNMOVED = ("timeout", "paranoid", "encrypt")  # settings that change no weight

# Below LOW_DENSITY a run starts at WARMUP_START and comes down over these epochs or this share of it, if that is less.
LOW_DENSITY = 0.005
WARMUP_START = 0.25
WARMUP_EPOCHS = 4
WARMUP_SHARE = 0.3


@dataclass
class Tally:
    """An epoch so far, on this rank. `rested` are steps that it has left out, and `last` is its last step's loss."""

    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    rested: int = 0
    last: float = 0.0


class Run:
    """A recipe on the ranks of an existing process group. Collective: every rank makes one, in the same way.

    `step` counts what has been done and `history` the epochs that are closed; together they are the position, also in
    the middle of an epoch. What is random in a step depends on its number, so there is no generator to save. With a
    `rule`, ranks exchange weights that each steps by itself; without one, gradients. A `rival` averages these instead,
    and without a `config` DDP does. With `chooses`, the method is what is measured to be quickest.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: SyncConfig | None,
        data_dir: Path | None = None,
        *,
        rule: LocalUpdates | None = None,
        rival: str | None = None,
        plan: PlanFile | None = None,
        chooses: bool = False,
    ) -> None:
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.recipe, self.settings = recipe, recipe.settings
        self.data = _load(recipe, data_dir)
        self.steps_per_epoch = self.count_steps()
        self.last_step = self.settings.epochs * self.steps_per_epoch
        if self.settings.max_steps is not None:
            self.last_step = min(self.last_step, self.settings.max_steps)
        self.epochs = -(-self.last_step // self.steps_per_epoch)
        self.rate = LearningRate(self.settings, self.steps_per_epoch, self.workers)
        torch.manual_seed(self.settings.seed)
        model = build_model(recipe.model, self.data.facts, self.data.name)
        if plan is not None:
            plan.check_for(self.workers, {name: each.numel() for name, each in model.named_parameters()})
        self.model = _distributed(model, rival) if rule is None else model
        self.rule, self.rival, self.config = rule, rival, config or SyncConfig(method="dense")
        self.chooses = chooses
        # Sparse gradients are clipped, and momentum acts, before the selection; auto sees to it where it is dense.
        before = rule is None and rival is None and (chooses or is_sparse(self.config))
        self.optimizer = build_optimizer(self.model, self.settings)
        self.clip = None if before else self.settings.clip
        self.sync = Idle() if config is None else self._attached(plan is not None and config.is_dense, before)
        self.step = 0
        self.carried: Any = None
        self.tally = Tally()
        self.history: list[EpochReport] = []
        self.readings: list[Reading] = []
        self.resumed_at: int | None = None
        self.workers_before: int | None = None  # if a run with another number of them was taken up
        self._earlier, self._mark = SyncCosts(), SyncCosts()

    @property
    def method(self) -> str:
        """Who synchronises: a method of ours, or a rival."""
        return self.rival or (AUTO if self.chooses else self.config.method)

    @property
    def chosen(self) -> str | None:
        """Where the method was to be chosen: which one is in force."""
        if not self.chooses:
            return None
        return self.sync.config.method if isinstance(self.sync, AutoSync) else self.sync.session.config.method

    def _attach(self, before: bool) -> SyncHandle:
        auto: dict[str, Any] = {"method": AUTO} if self.chooses else {}
        if self.rival is not None:
            assert isinstance(self.model, DistributedDataParallel)
            return Rival(self.rival, self.model, self.workers)
        if self.rule is not None:
            if self.rule.on_loss == "continue":
                raise ConfigError(
                    'on_loss="continue" is for scripts of your own: the recipes save and test with all ranks of'
                    " a process group, which ends with its first member. Let a launcher restart the run instead"
                    " (torchrun --max-restarts, with --resume auto)."
                )
            return attach(self.model, optimizer=self.optimizer, update=self.rule, config=self.config, **auto)
        self.config = with_warmup(self.config, self.settings.epochs, self.steps_per_epoch)
        if before and self.settings.clip is not None:
            self.config = with_clip(self.config, self.settings)
        # The averaged gradient is clipped behind it, so momentum then stays where it comes after that.
        given = {**auto, "optimizer": self.optimizer if self.clip is None else False}
        return attach(self.model, config=self.config, **given)

    def _attached(self, by_ddp: bool, before: bool) -> SyncHandle:
        """With gradients, DDP may be left alone, where a plan has found that nothing beats it."""
        if self.rule is not None or not by_ddp:
            return self._attach(before)
        assert isinstance(self.model, DistributedDataParallel)
        return AutoSync(self.model, optimizer=False, config=self.config, chooses=False)

    @property
    def module(self) -> nn.Module:
        """The model itself, whether DDP has wrapped it or not."""
        module: nn.Module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return module

    @property
    def samples_per_step(self) -> int:
        return self.workers * self.settings.batch_size * self.settings.accumulate

    def outline(self) -> Outline:
        return Outline(
            recipe=self.recipe.name,
            method=self.method,
            way=way(self.method, self.rule),
            workers=self.workers,
            metric=self.data.task.metric,
            epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            first_step=self.step,
            last_step=self.last_step,
            samples_per_step=self.samples_per_step,
        )

    @property
    def end_of_epoch(self) -> int:
        """The step at which the epoch that is going on ends."""
        return min((len(self.history) + 1) * self.steps_per_epoch, self.last_step)

    # --- a step ---------------------------------------------------------------------------------------------------

    def without_exchange(self) -> contextlib.AbstractContextManager[None]:
        """For a micro-batch that others of the same step follow. Local updates exchange nothing in backward anyway."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else contextlib.nullcontext()

    # --- an epoch -------------------------------------------------------------------------------------------------

    def rest_of_epoch(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step that this epoch still has, or that is left of the run."""
        seed, count, epoch = self.settings.seed, self.settings.accumulate, len(self.history)
        done, until = (step - epoch * self.steps_per_epoch for step in (self.step, self.end_of_epoch))
        if done == 0:
            self.carried = None
        positions = self._order(epoch)[: until * count, self.rank]
        seeds = (seed, epoch, self.rank)
        loaded = batches(self.data.train, positions, seeds=seeds, first=done * count, loaders=self.settings.loaders)
        for _ in range(done, until):
            yield list(islice(loaded, count))

    def count_step(self, loss: float, rate: float, seconds: float) -> StepReport:
        """A step is done: this rank's loss, the learning rate it had, and the time it took."""
        self.step += 1
        self.tally.steps += 1
        self.tally.loss += loss
        self.tally.last = loss
        self.tally.seconds += seconds
        return StepReport(self.step, len(self.history) + 1, loss, rate, seconds)

    def count_rest(self, rate: float, seconds: float) -> StepReport:
        """A step has passed that this rank has left out: what it carries from batch to batch is broken off."""
        self.step += 1
        self.carried = None
        self.tally.steps += 1
        self.tally.rested += 1
        self.tally.seconds += seconds
        return StepReport(self.step, len(self.history) + 1, self.tally.last, rate, seconds)

    def note_test(self, figures: dict[str, float]) -> Reading:
        """The model has been tested as it is now."""
        seconds = sum(epoch.seconds for epoch in self.history) + self.tally.seconds
        sent = sum(epoch.costs.bytes_sent for epoch in self.history) + self._spent().bytes_sent
        reading = Reading(self.step, seconds, sent, figures)
        self.readings.append(reading)
        return reading

    def close_epoch(self, figures: dict[str, float]) -> EpochReport:
        """Sum up the epoch that was going on, with what a test at its end has found, if there was one. Collective."""
        steps, seconds = self.tally.steps, self.tally.seconds
        sums = torch.tensor([self.tally.loss, steps - self.tally.rested], dtype=torch.float64)
        dist.all_reduce(sums)
        loss, computed = sums.tolist()
        report = EpochReport(
            epoch=len(self.history) + 1,
            step=self.step,
            train_loss=loss / computed if computed else float("nan"),
            figures=figures,
            lr=self.rate.at(max(0, self.step - 1)),
            seconds=seconds,
            samples_per_second=computed * self.samples_per_step / self.workers / seconds if seconds else 0.0,
            costs=self._spent(),
        )
        self.history.append(report)
        self.tally = Tally()
        self._earlier, self._mark = SyncCosts(), self._all_costs()
        return report

    def finish(self) -> None:
        """The last step is done: leave all ranks with the same model, and count what that takes. Collective.

        Local updates send all that is left, so the last test is of the model that is handed out.
        """
        if self.rule is None:
            return
        started, session = time.perf_counter(), self.sync.session
        session.wait()  # what is under way counts by itself
        before = session.transport.traffic.copy()
        self.sync.flush()
        self._earlier += SyncCosts.between(before, session.transport.traffic)
        self.tally.seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[nn.Module]:
        """The model as all ranks would hand it out: shared weights, mean statistics. Collective; changes nothing."""
        with self.sync.shared(), averaged_statistics(self.module):
            yield self.module

    def report(self) -> TrainReport:
        """The run as it has become. Collective."""
        with self.handed_out():
            checksum = _checksum(self.module)
        return TrainReport(
            recipe=self.recipe.name,
            model=self.recipe.model,
            data=self.recipe.data,
            method=self.method,
            workers=self.workers,
            metric=self.data.task.metric,
            better=self.data.task.better,
            settings=self.settings,
            config=self.config,
            parameters=_size(self.model),
            steps=self.step,
            density=1.0 if self.sync.stats().total.dense else self.config.density_at(self._exchanges),
            parameters_sha256=checksum,
            resumed_at=self.resumed_at,
            note=self.data.note,
            rule=self.rule,
            chosen=self.chosen,
            epochs=list(self.history),
            readings=list(self.readings),
        )

    # --- taking it up again ---------------------------------------------------------------------------------------

    def identity(self) -> State:
        """What must be the same in a run that goes on with this one."""
        return {
            "model": self.recipe.model,
            "dataset": self.recipe.data,
            "training examples": len(self.data.train),
            "workers": self.workers,
            "update": GRADIENTS if self.rule is None else "local",
            **{name.replace("_", "-"): value for name, value in self.settings.trajectory.items()},
            **{name.replace("_", "-"): value for name, value in self.config.to_dict().items() if name not in UNMOVED},
            "method": AUTO if self.chooses else self.config.method,
            **{name.replace("_", "-"): value for name, value in (asdict(self.rule) if self.rule else {}).items()},
        }

    def common_state(self) -> State:
        """What all ranks have in common: the model as it would be handed out, and the optimizer. Collective.

        With local updates each rank has an optimizer of its own, in the state of its synchronisation.
        """
        with self.handed_out():
            model = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict() if self.rule is None else None}

    def own_state(self) -> State:
        """What is this rank's alone: residuals or own weights, velocities and controllers, BatchNorm's
        statistics, what a language model carries from batch to batch, the epoch so far, and what tests have found."""
        return {
            "sync": self.sync.state_dict(),
            "buffers": dict(self.module.named_buffers()),
            "carried": self.carried,
            "tally": asdict(self.tally),
            "costs": asdict(self._spent()),
            "readings": [asdict(reading) for reading in self.readings],
        }

    def load(self, step: int, history: Sequence[EpochReport], common: State, own: State) -> None:
        """Be the run that was saved, bit for bit. Weights that are not finite are refused: no step could mend them."""
        broken = [n for n, each in common["model"].items() if each.is_floating_point() and not each.isfinite().all()]
        if broken:
            raise StateError(f"the weights {broken[0]!r} in this checkpoint are not finite; go on from an earlier one.")
        self.step = self.resumed_at = step
        self.history = list(history)
        self.module.load_state_dict(common["model"])
        if self.rule is None:
            self.optimizer.load_state_dict(common["optimizer"])
        self.sync.load_state_dict(own["sync"])
        for name, buffer in self.module.named_buffers():
            buffer.copy_(own["buffers"][name])
        self.carried = own["carried"]
        self.tally = Tally(**own["tally"])
        self.readings = [Reading(**each) for each in own["readings"]]
        self._earlier, self._mark = SyncCosts(**own["costs"]), self._all_costs()

    def load_from_others(
        self, step: int, history: Sequence[EpochReport], common: State, owned: Sequence[State]
    ) -> None:
        """Go on where a run with another number of workers was, given what each of them had: from their means.

        The model is what it was, and what all ranks hold back together keeps its weight in the averages to come.
        """
        self.workers_before = len(owned)
        self.step = self.resumed_at = self.position_of(step, len(owned))
        self.history = list(history)
        self.module.load_state_dict(common["model"])
        if self.rule is None:
            self.optimizer.load_state_dict(common["optimizer"])
        states = [own["sync"] for own in owned]
        self.sync.load_state_dict({**states[0], "ranks": states})
        self.carried = None
        tallies = [Tally(**own["tally"]) for own in owned]
        self.tally = replace(tallies[0], loss=sum(each.loss for each in tallies) / len(tallies))
        self.readings = [Reading(**each) for each in owned[0]["readings"]]
        self._earlier, self._mark = SyncCosts(**owned[0]["costs"]), self._all_costs()

    def position_of(self, step: int, workers: int) -> int:
        """The step of this run that is as far into its epochs as this one of a run with so many workers."""
        theirs = self.count_steps(workers)
        epoch, done = divmod(step, theirs)
        return epoch * self.steps_per_epoch + done * self.steps_per_epoch // theirs

    @property
    def _exchanges(self) -> int:
        return self.step if self.rule is None else self.step // self.rule.every

    def _all_costs(self) -> SyncCosts:
        return SyncCosts.of(self.sync.stats().total)

    def _spent(self) -> SyncCosts:
        return self._earlier + (self._all_costs() - self._mark)

    def _order(self, epoch: int, workers: int | None = None) -> torch.Tensor:
        workers = workers or self.workers
        return self.data.train.order(workers, self.settings.batch_size, seed=self.settings.seed, epoch=epoch)

    def count_steps(self, workers: int | None = None) -> int:
        """Of an epoch, with so many workers instead of ours."""
        count, accumulate = len(self._order(0, workers)), self.settings.accumulate
        if count < accumulate:
            raise ConfigError(
                f"an epoch has {count} micro-batches, too few to accumulate {accumulate}; accumulate at most {count}."
            )
        return count // accumulate


def is_sparse(config: SyncConfig) -> bool:
    """Whether anything is left out of what is sent."""
    return not config.is_dense and config.density != 1.0


def with_warmup(config: SyncConfig, epochs: int, steps_per_epoch: int) -> SyncConfig:
    """Below 0.5 %, a run begins at 25 % and comes down over its first epochs, unless the configuration says how.

    A step that sends one entry in a thousand moves most weights only once in a thousand steps: without this, a run of
    some epochs is over before it has moved them (docs/convergence.md).
    """
    if isinstance(config.density, DensitySchedule) or config.density >= LOW_DENSITY or config.is_dense:
        return config
    steps = round(min(WARMUP_EPOCHS, WARMUP_SHARE * epochs) * steps_per_epoch)
    return replace(config, density=DensitySchedule(config.density, WARMUP_START, steps))


def with_clip(config: SyncConfig, settings: TrainSettings) -> SyncConfig:
    """Each worker clips its own gradient, before it is accumulated: later, a clip would cut into what had waited.

    To sqrt(workers) times the norm, because averaging takes that much off the noise in which most of it consists. A
    `clip_norm` counts instead.
    """
    if config.clip_norm is not None or settings.clip is None:
        return config
    return replace(config, clip_norm=settings.clip)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _load(recipe: Recipe, data_dir: Path | None) -> DataSet:
    window, options = recipe.settings.window, {}
    if window is not None:
        options["window"] = window
        if recipe.data in DATASETS and "window" not in _parameters(DATASETS[recipe.data]):
            raise ConfigError(f"{recipe.data} is no text; leave --window out.")
    data = load_data(recipe.data, data_dir, **options)
    if recipe.settings.subset is None:
        return data
    return DataSet(
        name=data.name,
        train=part_of(data.train, recipe.settings.subset),
        test=data.test,
        task=data.task,
        facts=data.facts,
        note=f"{data.note} Trained on {recipe.settings.subset:,} of {len(data.train):,} examples.".strip(),
    )


def _parameters(place: str) -> Collection[str]:
    module, _, function = place.partition(":")
    return inspect.signature(getattr(importlib.import_module(module), function)).parameters


def _distributed(model: nn.Module, rival: str | None) -> DistributedDataParallel:
    """Running statistics stay each rank's own: see `averaged_statistics`."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {name: False, **({} if rival is None else buckets_for(rival))}
    return DistributedDataParallel(model, **settings)


def _checksum(module: nn.Module) -> str:
    """A checksum of every parameter and buffer, by name, type and value."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
