"""Rehearsal: a training script run for a few steps, without any exchange, to see what a step computes and how long.

DDP models that the script makes exchange nothing, `spardl.attach` only takes note, the process group is the one that is
there already, and after some steps the script is ended. What it leaves behind otherwise (files that it writes) is its
own.
"""

import contextlib
import functools
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from spardl.agreement import gather_values
from spardl.errors import ConfigError
from spardl.integrations import attach as attaching
from spardl.integrations.handle import SyncHandle
from spardl.integrations.model import COMPILED, plain_module
from spardl.metrics import SyncStats
from spardl.planning.choose import Compute
from spardl.planning.profile import BackwardClock, agreed
from spardl.transport.base import Transport

WARM_UP = 2
LEAST_STEPS, MOST_STEPS = 3, 10
SECONDS = 3.0


class Enough(BaseException):
    """The script has done as many steps as are needed. Not an error, so that the script does not catch it as one."""


class Idle(SyncHandle):
    """What `attach` returns in a rehearsal: nothing is synchronised, and nothing is kept."""

    def stats(self) -> SyncStats:
        return SyncStats()

    def observe(self, observer: Any) -> None:
        """There is nothing to see."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def gathered_state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """There is nothing to go on with."""

    def detach(self) -> None:
        """There is nothing to stop."""


class Sequel(Protocol):
    """What follows when enough steps have been timed: steps with exchanges, or nothing."""

    def begin(self, rehearsal: "Rehearsal", optimizer: Optimizer | None) -> bool:
        """Whether there is anything to follow."""
        ...

    def step(self, seconds: float) -> bool:
        """A step of it took so long; whether another one is to follow."""
        ...


class Rehearsal:
    """Watches the first model that is trained, and times its steps until there are enough of them.

    `sizes` are its parameters', by name, once it is known.
    """

    def __init__(self, sequel: Sequel | None = None) -> None:
        self._sequel = sequel
        self._follows = False
        self.sizes: dict[str, int] = {}
        self.device = torch.device("cpu")
        self._clock = BackwardClock()
        self._model: nn.Module | None = None
        self._parameters: set[int] = set()
        self._wanted = MOST_STEPS
        self._steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._marks: dict[str, float] = {}
        self._after: RemovableHandle | None = None
        self._begun: float | None = None  # when the step that is under way began: when the last one ended

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def model(self) -> nn.Module | None:
        """As it is trained: DDP's, if DDP has wrapped it."""
        return self._model

    # --- watching -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, models that DDP wraps exchange nothing, and their steps are timed."""
        made = DistributedDataParallel.__init__
        watch = self.watch

        @functools.wraps(made)
        def make(model: DistributedDataParallel, *given: Any, **named: Any) -> None:
            made(model, *given, **named)
            watch(model)

        before = register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer))
        self._stand_last()
        try:
            with mock.patch.object(DistributedDataParallel, "__init__", make):
                yield
        finally:
            for hook in (before, self._after):
                if hook is not None:
                    hook.remove()

    def _stand_last(self) -> None:
        """Among the hooks that follow an optimizer's step: a sequel adds and removes others, and none may be left to
        call then."""
        if self._after is not None:
            self._after.remove()
        self._after = register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))

    def watch(self, model: nn.Module) -> None:
        """This model will be trained."""
        if self._model is not None:
            return
        self._model, inner = model, plain_module(model)
        trained = {name.replace(COMPILED, ""): each for name, each in inner.named_parameters() if each.requires_grad}
        self.sizes = {name: each.numel() for name, each in trained.items()}
        self._parameters = {id(each) for each in trained.values()}
        self.device = next(iter(trained.values())).device
        model.register_forward_pre_hook(lambda *_: self._forward_begins())
        model.register_forward_hook(lambda *_: self._forward_ends())
        for name, each in trained.items():
            each.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))

    def _forward_begins(self) -> None:
        if isinstance(self._model, DistributedDataParallel) and not self._follows:
            self._model.require_backward_grad_sync = False
        if torch.is_grad_enabled():
            self._marks["forward"] = time.perf_counter()
            self._clock.forward_begins()

    def _forward_ends(self) -> None:
        if torch.is_grad_enabled():
            now = time.perf_counter()
            self._add("forward", now - self._marks["forward"])
            self._marks["backward"] = now
            self._clock.forward_ends()

    def _on_gradient(self, name: str, _: object) -> None:
        self._clock.stamp(name)
        self._marks["gradient"] = time.perf_counter()

    def _add(self, part: str, seconds: float) -> None:
        self._now[part] = self._now.get(part, 0.0) + seconds

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"])

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._is_ours(optimizer):
            self._add("backward", max(0.0, self._marks.get("gradient", 0.0) - self._marks.get("backward", 0.0)))
            self._marks["optimizer"] = time.perf_counter()

    def _after_step(self, optimizer: Optimizer) -> None:
        if not self._is_ours(optimizer):
            return
        now, begun = time.perf_counter(), self._begun
        self._add("optimizer", now - self._marks["optimizer"])
        if self._follows:
            assert begun is not None and self._sequel is not None
            self._go_on(self._sequel.step(now - begun))
            return
        if begun is not None:
            self._clock.keep()
            self._steps.append({**self._now, "whole": now - begun})
        self._now, self._begun = {}, now
        if len(self._steps) == WARM_UP:
            self._wanted = self._agree_on_steps()
        if len(self._steps) >= WARM_UP + self._wanted:
            self._follows = self._sequel is not None
            self._go_on(self._sequel is not None and self._sequel.begin(self, optimizer))

    def _go_on(self, follows: bool) -> None:
        """What has to be done between two steps is done."""
        if not follows:
            raise Enough
        self._stand_last()
        self._begun = time.perf_counter()

    def _agree_on_steps(self) -> int:
        """As many as there is time for; the same on all ranks."""
        seconds = torch.tensor(self._steps[-1]["whole"], device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return int(min(MOST_STEPS, max(LEAST_STEPS, SECONDS / max(float(seconds), 1e-6))))

    # --- what came of it ------------------------------------------------------------------------------------------

    def compute(self, transport: Transport) -> Compute:
        """What a step computes: medians over steps, means over ranks. Collective.

        Raises:
            ConfigError: too few steps were seen.
        """
        counted = self._steps[WARM_UP:] or self._steps
        names = ("forward", "backward", "optimizer", "whole")
        mine = {name: statistics.median(each.get(name, 0.0) for each in counted) if counted else 0.0 for name in names}
        reading = {"parts": mine, "steps": self.steps, "clock": self._clock.reading() if self._clock.passes else None}
        everyone = gather_values(transport.gather_texts, reading)
        if min(each["steps"] for each in everyone) < LEAST_STEPS:
            raise ConfigError(
                f"only {self.steps} steps of training were seen, too few to time; train a model that"
                " DistributedDataParallel has wrapped, or that spardl.attach was given, with an optimizer of torch, for"
                f" {WARM_UP + LEAST_STEPS + 1} steps or more."
            )
        forward, backward, optimizer, whole = (
            sum(each["parts"][name] for each in everyone) / len(everyone) for name in names
        )
        profile = agreed([each["clock"] for each in everyone], self.sizes)
        other = max(0.0, whole - forward - backward - optimizer)
        return Compute(forward, backward, optimizer, other, profile)


def rehearse(body: Callable[[], object], sequel: Sequel | None = None) -> Rehearsal:
    """Run `body`, which trains a model, until enough of its steps have been seen, or it ends."""
    rehearsal = Rehearsal(sequel)
    with rehearsal.watching(), contextlib.suppress(Enough):
        body()
    return rehearsal


def rehearse_script(path: Path, arguments: Sequence[str], sequel: Sequel | None = None) -> Rehearsal:
    """Run a script as Python would, in the process group that is there.

    Raises:
        ConfigError: it cannot be read, or fails.
    """
    rehearsal = Rehearsal(sequel)

    def attach(model: nn.Module, **_: Any) -> Idle:
        rehearsal.watch(model)
        return Idle()

    def nothing(*_: Any, **__: Any) -> None:
        """The process group is there, and stays."""

    with (
        mock.patch.object(attaching, "attach", attach),
        mock.patch.object(dist, "init_process_group", nothing),
        mock.patch.object(dist, "destroy_process_group", nothing),
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
        contextlib.redirect_stdout(sys.stderr),
        rehearsal.watching(),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except (Enough, SystemExit):
            pass
        except Exception as error:
            raise ConfigError(
                f"{path} failed on rank {dist.get_rank()} after {rehearsal.steps} timed steps:"
                f" {type(error).__name__}: {error}"
            ) from error
    return rehearsal
