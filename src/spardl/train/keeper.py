"""Saves a run when it is time, stops it when it was asked to, and takes it up again. On all ranks at the same step."""

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from spardl.choices import is_count
from spardl.errors import CheckpointError, SparDLError, Stopped
from spardl.train.checkpoint import (
    COMMON,
    Facts,
    check_files,
    discard,
    publish,
    rank_file,
    read_meta,
    read_state,
    unfinished,
    write_state,
)
from spardl.train.council import Council
from spardl.train.report import EpochReport
from spardl.train.run import Run
from spardl.train.saving import Saving, checkpoint_name, is_checkpoint, steps_in
from spardl.version import __version__

LONGEST_TEXT = 800


class Keeper:
    """One rank's part in it. `asked` returns the number of a signal that asks this rank to stop, or 0."""

    def __init__(self, saving: Saving, asked: Callable[[], int] = lambda: 0) -> None:
        self._saving = saving
        self._council = Council(asked, saving.every.seconds)

    def after_step(self, run: Run) -> None:
        """Save if it is time, all ranks together; raise `Stopped` if any of them was asked to stop."""
        if self._saving.folder is None:
            return
        decision = self._council.decide(run.step)
        steps = self._saving.every.steps
        due = decision.save or run.step == run.last_step or (steps is not None and run.step % steps == 0)
        if due or decision.stop:
            self._save(run, self._saving.folder)
        if decision.stop:
            name = Signals(decision.stop).name
            raise Stopped(f"stopped at step {run.step} by {name}; go on with --resume.", signal=decision.stop)

    def restore(self, run: Run) -> None:
        """Go on from the checkpoint that was asked for. Collective. A damaged one is an error, or, where the latest was
        asked for, left aside in favour of the one before it."""
        if self._saving.folder is not None and run.rank == 0:
            for left in self._saving.folder.glob("step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        if self._saving.resume is None:
            return
        candidates = self._candidates(run)
        for folder in candidates:
            problem, final = _first_problem(functools.partial(self._load, run, folder))
            if not problem:
                self._council.note_save()
                if run.rank == 0 and run.workers_before is not None:
                    print(f"spardl: {_resized(run, folder)}", file=sys.stderr, flush=True)
                return
            if final or len(candidates) == 1:
                raise CheckpointError(problem)
            if run.rank == 0:
                print(f"spardl: {problem} Trying an earlier one.", file=sys.stderr, flush=True)
        if candidates:
            raise CheckpointError(f"none of the {len(candidates)} checkpoints in {candidates[0].parent} can be used.")

    def _candidates(self, run: Run) -> list[Path]:
        """What to try, best first: the same on all ranks, as rank 0 sees it."""
        resume = self._saving.resume
        asked = None if resume in (None, "latest", "auto") else Path(str(resume))
        if asked is not None and is_checkpoint(asked):
            return [asked]
        folder = asked or self._saving.folder
        assert folder is not None, "Saving.check() refuses this"
        steps = json.loads(_gather(json.dumps(in_order(run, folder)[::-1][:40]))[0])
        return [folder / checkpoint_name(step) for step in steps]

    def _load(self, run: Run, folder: Path) -> None:
        meta = read_meta(folder)
        workers = _compare(folder, meta["identity"], run)
        if run.position_of(meta["step"], workers) > run.last_step:
            raise _Refused(f"the checkpoint {folder} is beyond the last step, {run.last_step}; raise --max-steps.")
        epochs, in_each = len(meta["history"]), run.count_steps(workers)
        if not 0 <= meta["step"] - epochs * in_each <= in_each:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: step {meta['step']} is not after {epochs} epochs."
            )
        if run.rank == 0:
            check_files(folder, meta["files"])
        common = read_state(folder, COMMON, meta["files"])
        ranks = [run.rank] if workers == run.workers else range(workers)
        owned = [read_state(folder, rank_file(rank), meta["files"]) for rank in ranks]
        try:
            history = [EpochReport.from_dict(record) for record in meta["history"]]
            if workers == run.workers:
                run.load(meta["step"], history, common, owned[0])
            else:
                run.load_from_others(meta["step"], history, common, owned)
        except SparDLError:
            raise
        except Exception as error:  # whatever a file that was made to look like one brings about
            raise CheckpointError(f"the checkpoint {folder} does not fit this run: {_gist(error)}.") from error

    def _save(self, run: Run, parent: Path) -> None:
        """Write a checkpoint together: a place, each rank's file, then the name. Of one that fails nothing is left."""
        folder = parent / checkpoint_name(run.step)
        try:
            self._write(run, parent, folder)
        except CheckpointError:
            shutil.rmtree(unfinished(folder), ignore_errors=True)
            raise

    def _write(self, run: Run, parent: Path, folder: Path) -> None:
        place = unfinished(folder)
        common = run.common_state()
        with _together(f"the checkpoint {folder} could not be written"):
            if run.rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
        files: dict[str, Facts] = {}
        with _together(f"the checkpoint {folder} could not be written"):
            # Elsewhere the folder may be another one, on a disk that is not shared; rank 0 finds out below.
            place.mkdir(parents=True, exist_ok=True)
            files[rank_file(run.rank)] = write_state(place / rank_file(run.rank), run.own_state())
            if run.rank == 0:
                files[COMMON] = write_state(place / COMMON, common)
        for told in _gather(json.dumps(files)):
            files.update(json.loads(told))
        with _together(f"the checkpoint {folder} could not be written"):
            if run.rank == 0:
                check_files(place, files)
                publish(folder, self._meta(run, files))
                self._prune(run, parent)
        self._council.note_save()

    def _meta(self, run: Run, files: dict[str, Facts]) -> dict[str, Any]:
        return {
            "spardl": __version__,
            "torch": torch.__version__,
            "recipe": run.recipe.name,
            "step": run.step,
            "identity": run.identity(),
            "history": [report.to_dict() for report in run.history],
            "files": files,
        }

    def _prune(self, run: Run, parent: Path) -> None:
        """Leave the last few, up to this step: where a run was taken up at an earlier one, later ones are as good."""
        steps = in_order(run, parent)
        for old in steps[: steps.index(run.step) + 1][: -self._saving.keep]:
            discard(parent / checkpoint_name(old))


def in_order(run: Run, folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, by how far into the epochs they are: a run with more workers has fewer
    steps, so that one which went on with more has later checkpoints with lower numbers."""
    in_each = functools.cache(run.count_steps)

    def epochs(step: int) -> float:
        with contextlib.suppress(SparDLError):
            workers = read_meta(folder / checkpoint_name(step))["identity"].get("workers")
            return step / in_each(workers if is_count(workers, least=1) else run.workers)
        return step / in_each(run.workers)  # it is damaged, as whoever tries it will find

    return sorted(steps_in(folder), key=epochs)


class _Refused(CheckpointError):
    """A checkpoint that is whole, and not of this run: no other one will do instead."""


def _compare(folder: Path, then: dict[str, Any], run: Run) -> int:
    """Refuse a checkpoint of a run with other settings; return how many workers that one had.

    How many, and how many epochs, may differ: these only where no learning rate so far depends on it.
    """
    now = json.loads(json.dumps(run.identity()))
    for name in [*now, *then]:
        if then.get(name) == now.get(name) or name == "workers":
            continue
        if name == "epochs" and not run.settings.falls_until_the_end:
            continue
        text = f"the checkpoint {folder} is of a run with {name} {_shown(then.get(name))}, and this one has"
        text += f" {_shown(now.get(name))}; give the same settings, or begin anew without --resume."
        if name == "epochs":
            text += (
                f" (A {run.settings.schedule} schedule falls until the last epoch, so all rates so far would have been"
                " others; a run with --floor-step, or with the schedule milestones or constant, can be made longer.)"
            )
        raise _Refused(text)
    workers = then.get("workers")
    if not is_count(workers, least=1):
        raise CheckpointError(f"the checkpoint {folder} is damaged: it is of {workers!r} workers.")
    return int(str(workers))


def _resized(run: Run, folder: Path) -> str:
    kept = "residuals begin" if run.rule is None else "each rank's own weights and optimizer begin"
    return (
        f"{folder} was saved by {run.workers_before} workers, and here are {run.workers}: {kept} at the mean of theirs,"
        f" what is left of the epoch is dealt anew, and a step has {run.samples_per_step} examples."
    )


def _gist(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


@contextlib.contextmanager
def _together(what: str) -> Iterator[None]:
    """Go on when all ranks came through; if any could not, all raise its reason. Collective."""
    problem = ""
    try:
        yield
    except (OSError, SparDLError) as error:
        problem = f"rank {dist.get_rank()}: {error}"
    problems = [each for each in _gather(problem) if each]
    if problems:
        reason = problems[0].rstrip(".")
        raise CheckpointError(f"{what}: {reason}. The checkpoints before it are whole.", writing=True)


def _first_problem(attempt: Callable[[], None]) -> tuple[str, bool]:
    """Let all ranks try; the first one's reason if any could not, and whether that is final. Collective."""
    problem = ""
    try:
        attempt()
    except SparDLError as error:
        problem = f"{'refused' if isinstance(error, _Refused) else 'damaged'}:{error}"
    found = next((each for each in _gather(problem) if each), "")
    kind, _, text = found.partition(":")
    return text, kind == "refused"


def _gather(text: str) -> list[str]:
    """Every rank's text, in rank order, cut off where it is too long. Collective."""
    mine = torch.zeros(LONGEST_TEXT, dtype=torch.uint8)
    coded = text.encode()[:LONGEST_TEXT]
    mine[: len(coded)] = torch.frombuffer(bytearray(coded), dtype=torch.uint8) if coded else mine[:0]
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in everybody]
