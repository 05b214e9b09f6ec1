"""What a rank of an attacked run does: train a small model, save it, and tell how it ended.

The fault strikes from inside, at a place that the trial names, so that a seed gives the same trial again.
"""

import contextlib
import hashlib
import json
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import spardl
from benchmarks.attack.plan import EVERY, STEPS, Trial
from spardl.integrations import arranger
from spardl.launch.place import Place
from spardl.launch.rendezvous import process_group
from spardl.sync import step as steps


class Fault:
    """What happens to this rank, once, at its place. `now` is the place where it is."""

    def __init__(self, trial: Trial | None, rank: int, tell: Callable[..., None]) -> None:
        self._trial = trial if trial is not None and rank in trial.victims else None
        self._tell = tell
        self.step = 0

    def at(self, place: str) -> None:
        trial = self._trial
        early = place in ("rendezvous", "attach", "probe")
        if trial is None or trial.place != place or not (early or self.step == trial.step):
            return
        self._trial = None
        self._tell("struck", when=time.monotonic())
        what = trial.fault.what
        if what in ("kill", "lose"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "raise":
            raise ArithmeticError("this batch was one too many")
        elif what == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1))
            torch.empty(1 << 40, dtype=torch.uint8)
        elif what == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        elif what == "clock":
            now = time.time
            time.time = lambda: now() - 1e6
        elif what == "link":
            time.sleep(0.3)  # the attacker has been told, and cuts the line meanwhile


def be_rank(rank: int, trial: Trial, place: dict[str, Any], folder: Path, *, resume: int, disturbed: bool) -> None:
    """Run to the end, or to the error; tell it in a file of this rank's own."""
    diary = (folder / f"rank-{rank}.jsonl").open("a", buffering=1)

    def tell(what: str, **more: Any) -> None:
        diary.write(json.dumps({"what": what, **more}) + "\n")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fault = Fault(trial if disturbed else None, rank, tell)
    began = [time.monotonic()]
    runner = _Runner(rank, trial, folder, fault, began)
    try:
        fault.at("rendezvous")
        began[0] = time.monotonic()
        with process_group(Place(rank=rank, workers=trial.workers, **place), trial.timeout):
            sha = runner.run(resume)
            tell("finished", sha=sha)
    except BaseException as error:
        tell(
            "error",
            type=type(error).__name__,
            ours=isinstance(error, spardl.SparDLError),
            text=str(error)[:400],
            peer=getattr(error, "peer", None),
            candidates=list(getattr(error, "candidates", ())),
            intact=runner.is_intact(),
            waited=time.monotonic() - began[0],
        )
    os._exit(0)


class _Runner:
    """The training itself."""

    def __init__(self, rank: int, trial: Trial, folder: Path, fault: Fault, began: list[float]) -> None:
        self._rank, self._folder, self._fault, self._began = rank, folder, fault, began
        self._settings = {"timeout": trial.timeout, **trial.settings}
        self._sync: Any = None
        self._kept: str | None = None  # of residuals after the last step that counts

    def run(self, resume: int) -> str:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 5))
        local = "update" in self._settings
        wrapped = model if local else DistributedDataParallel(model, bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self._fault.at("attach")
        self._began[0] = time.monotonic()
        self._sync = sync = spardl.attach(wrapped, optimizer=optimizer, **self._settings)
        self._lay_mines(model)
        if resume:
            saved = torch.load(self._file(resume), weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            sync.load_state_dict(saved["sync"])
        for step in range(resume, STEPS):
            self._fault.step = step
            self._began[0] = time.monotonic()
            self._fault.at("step")
            source = torch.Generator().manual_seed(1000 * step + self._rank)
            inputs = torch.randn(8, 20, generator=source)
            optimizer.zero_grad()
            loss = cross_entropy(wrapped(inputs), inputs[:, :5].argmax(1))
            self._fault.at("forward")
            loss.backward()
            optimizer.step()
            self._kept = self._state()
            if (step + 1) % EVERY == 0:
                self._save(step + 1, model, optimizer)
        if local:
            sync.flush()
        return _sum_of(model.state_dict())

    def _lay_mines(self, model: nn.Module) -> None:
        """Places inside of spardl, where a fault may strike."""
        fault, transport = self._fault, self._sync.session.transport
        perform, commit, agree = transport.perform, steps.commit, arranger.agree
        count = {"operations": 0, "step": -1}

        def performing(operation: Any) -> Any:
            if count["step"] != fault.step:
                count.update(step=fault.step, operations=0)
            trial = fault._trial
            if trial is not None and count["operations"] == trial.operation:
                fault.at("round")
            count["operations"] += 1
            return perform(operation)

        def committing(group: Any) -> Any:
            fault.at("commit")
            return commit(group)

        def agreeing(*given: Any, **named: Any) -> Any:
            fault.at("probe")
            return agree(*given, **named)

        transport.perform, steps.commit, arranger.agree = performing, committing, agreeing
        last = next(iter(model.parameters()))
        last.register_hook(lambda _: fault.at("hook"))

    def _save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Each rank its own file, whole or not at all."""
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": self._sync.state_dict()}
        partial = self._file(step).with_suffix(".partial")
        self._fault.at("writing")
        torch.save(parts, partial)
        self._fault.at("save")
        partial.rename(self._file(step))

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step}-rank-{self._rank}.pt"

    def is_intact(self) -> bool:
        """Whether residuals are those of the last step that has counted on this rank."""
        if self._sync is None or self._kept is None:
            return True
        with contextlib.suppress(Exception):
            return self._state() == self._kept
        return False

    def _state(self) -> str:
        """A sum of what a step that fails must leave alone. Weights of a rank's own have moved before it began."""
        replicas = getattr(self._sync, "_replicas", None)
        if replicas is not None:
            return _sum_of({name: each.shared for name, each in replicas.items()})
        return _sum_of(self._sync.state_dict())


def _sum_of(tree: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, tree)
    return digest.hexdigest()


def _add(digest: Any, tree: Any) -> None:
    if isinstance(tree, torch.Tensor):
        digest.update(tree.detach().contiguous().numpy().tobytes())
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            digest.update(str(key).encode())
            _add(digest, tree[key])
    elif isinstance(tree, list | tuple):
        for each in tree:
            _add(digest, each)
    else:
        digest.update(repr(tree).encode())
