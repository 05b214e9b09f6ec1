"""A run that was interrupted and went on is the run that was not, bit for bit; what is damaged is not used."""

import collections
import json
import os
import random
import resource
import shutil
import signal
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fakes
from mutations import mutated
from processes import on_processes
from spardl.config import SyncConfig
from spardl.errors import CheckpointError, ConfigError
from spardl.integrations import auto
from spardl.planning import survey
from spardl.train.checkpoint import facts_of
from spardl.train.keeper import Keeper, in_order
from spardl.train.loop import train
from spardl.train.recipes import Recipe
from spardl.train.report import Quiet
from spardl.train.run import Run
from spardl.train.saving import Every, Saving
from spardl.update import LocalUpdates, resolve

SPARSE = SyncConfig(density=0.1, dense_below=0)


@pytest.fixture(autouse=True)
def small_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.use(monkeypatch)


def test_checkpoints_are_in_the_order_of_epochs_whoever_made_them(tmp_path: Path) -> None:
    """A run that went on with more workers has fewer steps: step 797 of one worker came before step 400 of two. One
    whose facts cannot be read is taken for one of ours."""
    for step, workers in ((797, 1), (400, 2), (440, 2), (780, 1)):
        (tmp_path / f"step-{step:08d}").mkdir()
        meta = {"format": 1, "step": step, "identity": {"workers": workers}, "history": [], "files": {}}
        (tmp_path / f"step-{step:08d}" / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "step-00000420").mkdir()
    run: Any = types.SimpleNamespace(workers=2, count_steps=lambda workers: {1: 89, 2: 44}[workers])
    assert in_order(run, tmp_path) == [780, 797, 400, 420, 440]


def go_on(rank, workers, recipe, config, resume, folder=None, rule=None):
    return train(recipe, config, rule=rule, keeper=Keeper(Saving(folder=folder, resume=resume)))


def save_and_go_on(rank, workers, recipe, config, rule, folder, every):
    """Train to the end, saving on the way; then go on from each of these checkpoints."""
    whole = train(recipe, config, rule=rule, keeper=Keeper(Saving(folder=folder, every=every, keep=100)))
    again = [go_on(rank, workers, recipe, config, str(each), rule=rule) for each in sorted(folder.iterdir())]
    return whole, again


HARD = {
    "momentum, BatchNorm, dropout and augmentation": (
        fakes.POINTS.changed(nesterov=True, weight_decay=0.01, eval_steps=15),
        SPARSE,
    ),
    "Adam, a carried state and micro-batches": (
        fakes.RHYMES.changed(optimizer="adam", lr=0.01, accumulate=2, warmup=0.5, eval_steps=5),
        SyncConfig(method="exdyna", density=0.1, dense_below=0),
    ),
    "clipping, milestones and groups that follow DDP's buckets": (
        fakes.POINTS.changed(clip=0.5, schedule="milestones", milestones=(1.0, 1.5)),
        SyncConfig(density=0.1, dense_below=0, groups="bucket"),
    ),
}
ADAMW = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip": 0.5, "eval_steps": 5}
LOCAL = {
    "weights of its own, after every step": (fakes.POINTS.changed(**ADAMW), SPARSE, LocalUpdates()),
    "an exchange that lands late": (fakes.POINTS.changed(**ADAMW), SPARSE, LocalUpdates(every=3, delay=1)),
    "an exchange that is under way from one to the next": (
        fakes.RHYMES.changed(accumulate=2),
        SyncConfig(method="exdyna", density=0.1, dense_below=0),
        LocalUpdates(every=7, delay=7),
    ),
    "outer momentum": (
        fakes.POINTS,
        SPARSE,
        LocalUpdates(every=3, outer="nesterov", outer_rate=0.7, residual_decay=0.9),
    ),
    "DiLoCo's way": (fakes.POINTS.changed(**ADAMW), SyncConfig(density=1.0), resolve("diloco", {"every": 6})[0]),
}
QUICK = (
    "Adam, a carried state and micro-batches",
    "an exchange that is under way from one to the next",
    "outer momentum",
)
EVERY_CASE = [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in [*HARD, *LOCAL]]


@pytest.mark.parametrize("case", EVERY_CASE)
def test_going_on_equals_never_having_stopped(case: str, tmp_path: Path) -> None:
    """In the middle of an epoch, at its end, and at the end of the run: the same weights and the same report."""
    recipe, config, rule = LOCAL[case] if case in LOCAL else (*HARD[case], None)
    whole, again = on_processes(2, save_and_go_on, recipe, config, rule, tmp_path, Every(steps=10, seconds=None))[0]
    assert len(again) >= 2
    for report in again:
        assert report.resumed_at is not None
        assert report.parameters_sha256 == whole.parameters_sha256, f"resumed at step {report.resumed_at}"
        assert report.figures == whole.figures
        assert [epoch.train_loss for epoch in report.epochs] == [epoch.train_loss for epoch in whole.epochs]
        assert report.costs.bytes_sent == whole.costs.bytes_sent
        assert readings(report) == readings(whole)


def choose_and_go_on(rank, workers, recipe, rule, folder):
    """Train by whatever is chosen, saving on the way, and go on from the first checkpoint."""
    how = {"rule": rule, "chooses": True}
    saving = Saving(folder=folder, every=Every(steps=10, seconds=None), keep=100)
    whole = train(recipe, SPARSE, **how, keeper=Keeper(saving))
    first = str(sorted(folder.iterdir())[0])
    return whole, train(recipe, SPARSE, **how, keeper=Keeper(Saving(folder=None, resume=first)))


def go_on_with_others(rank, workers, recipe, folder):
    return train(recipe, SPARSE, chooses=True, keeper=Keeper(Saving(folder=None, resume=str(folder))))


@pytest.mark.parametrize(
    "rule", [None, pytest.param(LocalUpdates(every=2), marks=pytest.mark.slow)], ids=["gradients", "local"]
)
def test_a_run_whose_method_was_chosen_goes_on(rule: LocalUpdates | None, tmp_path: Path, quick_choice: None) -> None:
    """All ranks have chosen alike, before and after; which method it is depends on times."""
    recipe = fakes.POINTS.changed(clip=0.5)
    outcomes = on_processes(2, choose_and_go_on, recipe, rule, tmp_path)
    for reports in zip(*outcomes, strict=True):
        assert len({report.parameters_sha256 for report in reports}) == 1
        assert {report.method for report in reports} == {"auto"} and len({report.chosen for report in reports}) == 1
    assert outcomes[0][1].resumed_at == 10
    if rule is None:
        found = on_processes(3, go_on_with_others, recipe, sorted(tmp_path.iterdir())[0])
        assert len({report.parameters_sha256 for report in found}) == 1 and found[0].resumed_at is not None


@pytest.fixture
def quick_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little time for trials, and a sparse way to begin with, so that there is something to save."""
    monkeypatch.setattr(survey, "QUICK_S", 0.05)
    monkeypatch.setattr(auto, "begin_with", lambda found: (list(found.trials)[1], list(found.trials)[1]))


def readings(report):
    """What every test has found, and where; times are never alike."""
    return [(reading.step, reading.bytes_sent, reading.figures) for reading in report.readings]


class Quitter(Quiet):
    """Ends its own process at one step, without a word."""

    def __init__(self, step):
        self._step = step

    def step(self, report):
        if report.step == self._step:
            os._exit(0)


def die_at(rank, workers, recipe, folder, step):
    quitter = Quitter(step) if rank == 1 else Quiet()
    train(recipe, SPARSE, observer=quitter, keeper=Keeper(Saving(folder=folder, every=Every(steps=7, seconds=None))))


def test_a_rank_that_dies_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """At whatever step, the run goes on from the last one that was whole and ends alike."""
    step = int.from_bytes(os.urandom(2)) % 50 + 8
    outcomes = on_processes(2, die_at, fakes.POINTS, tmp_path, step, expect="any")
    assert outcomes[1] == ("died", None)
    assert outcomes[0][0] == "raised"
    report = on_processes(2, go_on, fakes.POINTS, SPARSE, "latest", tmp_path)[0]
    whole = on_processes(2, go_on, fakes.POINTS, SPARSE, None)[0]
    assert step - 7 <= report.resumed_at < step
    assert report.parameters_sha256 == whole.parameters_sha256


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints at steps 10, 20 and 27 of a run of two workers. Tests work on a copy."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as monkeypatch:
        fakes.use(monkeypatch)
        on_processes(2, save_run, folder)
    return folder


SHORT = fakes.POINTS.changed(max_steps=27)


def save_run(rank, workers, folder):
    train(SHORT, SPARSE, keeper=Keeper(Saving(folder=folder, every=Every(steps=10, seconds=None))))


def resumed(folder: Path, resume: str, recipe: Recipe = SHORT, config: SyncConfig = SPARSE, workers: int = 2) -> Any:
    """The step that the run went on from, or why it did not."""
    kind, value = on_processes(workers, go_on, recipe, config, resume, folder, expect="any")[0]
    return value.resumed_at if kind == "returned" else value.splitlines()[0]


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def damage(path: Path) -> None:
    """Change one byte in the middle; the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "name"), [(damage, "rank-00001.pt"), (cut_off, "common.pt"), (Path.unlink, "meta.json")]
)
def test_a_damaged_checkpoint_is_left_aside(harm: Any, name: str, folder: Path) -> None:
    """The latest that is whole counts, whichever file of the last one is damaged, cut off or gone."""
    harm(folder / "step-00000027" / name)
    assert resumed(folder, "latest") == 20


def test_a_damaged_checkpoint_that_was_named_is_refused(folder: Path) -> None:
    """Who asks for one does not get another; the sentence names the file."""
    damage(folder / "step-00000020" / "rank-00001.pt")
    answer = resumed(folder, str(folder / "step-00000020"))
    assert answer.startswith("CheckpointError") and "rank-00001.pt is not what was written" in answer


def test_what_is_not_whole_is_never_seen(folder: Path) -> None:
    """A folder that a killed run was still writing has no checkpoint's name, and is cleared away."""
    (folder / "step-00000027").rename(folder / "step-00000027.partial")
    assert resumed(folder, "latest", SHORT.changed(max_steps=21)) == 20
    assert not (folder / "step-00000027.partial").exists()


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (LocalUpdates(), "update gradients, and this one has local"),
        (None, "update local, and this one has gradients"),
        (LocalUpdates(every=5), "every 2, and this one has 5"),
    ],
)
def test_a_checkpoint_of_another_update_rule_is_refused(rule: LocalUpdates | None, sentence: str, folder: Path) -> None:
    """What is exchanged, and how often, decides the course of a run."""
    if "gradients, and" not in sentence:
        shutil.rmtree(folder)
        on_processes(2, go_on, SHORT, SPARSE, None, folder, LocalUpdates(every=2))
    kind, value = on_processes(2, go_on, SHORT, SPARSE, "latest", folder, rule, expect="any")[0]
    assert kind == "raised" and sentence in value.splitlines()[0]


@pytest.mark.parametrize(
    ("recipe", "config", "workers", "sentence"),
    [
        (SHORT.changed(lr=0.1), SPARSE, 2, "lr 0.05, and this one has 0.1"),
        (SHORT, SyncConfig(density=0.2, dense_below=0), 2, "density 0.1, and this one has 0.2"),
        (SHORT.changed(epochs=9), SPARSE, 2, "can be made longer"),
        (SHORT.changed(max_steps=5), SPARSE, 2, "beyond the last step, 5"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    recipe: Recipe, config: SyncConfig, workers: int, sentence: str, folder: Path
) -> None:
    """The sentence names the setting and both values; no older checkpoint is tried instead."""
    assert sentence in resumed(folder, "latest", recipe, config, workers)


def test_code_in_a_checkpoint_is_not_run(folder: Path, tmp_path: Path) -> None:
    """Files are read as tensors and numbers, even if their sums were made to fit."""
    target = folder / "step-00000027"
    witness = tmp_path / "witness"

    class Harm:
        def __reduce__(self):
            return Path.touch, (witness,)

    torch.save({"model": Harm()}, target / "common.pt")
    meta = json.loads((target / "meta.json").read_text())
    meta["files"]["common.pt"] = facts_of(target / "common.pt")
    (target / "meta.json").write_text(json.dumps(meta))
    assert "common.pt is no plain state" in resumed(folder, str(target))
    assert not witness.exists()


def test_more_steps_may_be_asked_for(folder: Path) -> None:
    """Where a run ends is not what it is: the same run goes on further, exactly."""
    longer = SHORT.changed(max_steps=33)
    report = on_processes(2, go_on, longer, SPARSE, "latest", folder)[0]
    whole = on_processes(2, go_on, longer, SPARSE, None)[0]
    assert (report.resumed_at, report.steps) == (27, 33)
    assert report.parameters_sha256 == whole.parameters_sha256


STEADY = fakes.POINTS.changed(schedule="constant", epochs=1)


@pytest.mark.parametrize(
    "rule", [None, pytest.param(LocalUpdates(), marks=pytest.mark.slow)], ids=["gradients", "local"]
)
def test_more_epochs_may_be_asked_for_where_no_rate_depends_on_them(rule: LocalUpdates | None, tmp_path: Path) -> None:
    """The longer run is the same one from its first step, so it goes on exactly."""
    on_processes(2, go_on, STEADY, SPARSE, None, tmp_path, rule)
    longer = STEADY.changed(epochs=3)
    report = on_processes(2, go_on, longer, SPARSE, "latest", tmp_path, rule)[0]
    whole = on_processes(2, go_on, longer, SPARSE, None, None, rule)[0]
    assert report.resumed_at == whole.steps // 3
    assert report.parameters_sha256 == whole.parameters_sha256
    assert [epoch.epoch for epoch in report.epochs] == [1, 2, 3]


def start_from(rank, workers, recipe, config, folder, rule):
    """What a run has right after it has taken up a checkpoint."""
    run = Run(recipe, config, rule=rule)
    Keeper(Saving(resume="latest", folder=folder)).restore(run)
    with run.sync.shared():
        weights = torch.cat([each.flatten() for each in run.module.parameters()]).detach().clone()
    state = run.sync.state_dict()
    waiting = {n: state["local"]["own"][n] for n in state["local"]["own"]} if rule else state["residuals"]
    return weights, torch.cat([waiting[name] for name in sorted(waiting)]), run.step, run.steps_per_epoch


@pytest.mark.parametrize("rule", [None, LocalUpdates()], ids=["gradients", "local"])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_another_number_of_workers_goes_on_from_the_mean(
    rule: LocalUpdates | None, workers: int, tmp_path: Path
) -> None:
    """The model is the same, what waits is the mean of what had waited, and the epoch is as far as it was."""
    half = STEADY.changed(epochs=2)
    steps = on_processes(2, go_on, half, SPARSE, None, None, rule)[0].steps // 2
    stop = half.changed(max_steps=steps + steps // 2)
    on_processes(2, go_on, stop, SPARSE, None, tmp_path, rule)
    before = on_processes(2, start_from, half, SPARSE, tmp_path, rule)
    after = on_processes(workers, start_from, half, SPARSE, tmp_path, rule)
    mean = torch.stack([waiting for _, waiting, _, _ in before]).double().mean(0)
    for weights, waiting, step, per_epoch in after:
        assert torch.equal(weights, before[0][0])
        torch.testing.assert_close(waiting.double(), mean, rtol=1e-5, atol=1e-7)
        assert step == per_epoch + (steps // 2) * per_epoch // steps
    report = on_processes(workers, go_on, half, SPARSE, "latest", tmp_path, rule)[0]
    assert report.steps == 2 * after[0][3]
    assert all(epoch.train_loss > 0 for epoch in report.epochs)


def keep_last(rank, workers, folder):
    train(SHORT, SPARSE, keeper=Keeper(Saving(folder=folder, every=Every(steps=5, seconds=None), keep=2)))


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    """Older ones go when a newer one is whole."""
    on_processes(2, keep_last, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000025", "step-00000027"]


def stop_after(rank, workers, folder, step):
    """Only rank 1 is asked, at some step."""
    seen = []
    watcher = Quiet()
    watcher.step = lambda report: seen.append(report.step)
    asked = lambda: signal.SIGTERM if rank == 1 and len(seen) >= step else 0  # noqa: E731
    # Ranks agree a few times per second, or once in a thousand steps: nothing computes so fast that it ends before.
    train(fakes.POINTS.changed(epochs=100), SPARSE, observer=watcher, keeper=Keeper(Saving(folder=folder), asked))


def test_one_rank_that_is_asked_stops_all_of_them(tmp_path: Path) -> None:
    """They agree on a step, save there, and say so alike."""
    outcomes = on_processes(2, stop_after, tmp_path, 12, expect="any")
    (first, text), (second, other) = ((kind, value.splitlines()[0]) for kind, value in outcomes)
    assert first == second == "raised" and text == other
    assert text.startswith("Stopped: stopped at step ") and text.endswith("by SIGTERM; go on with --resume.")
    step = int(text.split()[4])
    assert [each.name for each in tmp_path.iterdir()] == [f"step-{step:08d}"]


def save_by_time(rank, workers, folder):
    train(SHORT, SPARSE, keeper=Keeper(Saving(folder=folder, every=Every(steps=None, seconds=1e-6))))


def test_time_to_save_is_agreed_on(tmp_path: Path) -> None:
    """No two clocks are alike: ranks save when any of them says so, all at the same step."""
    on_processes(2, save_by_time, tmp_path)
    assert len(list(tmp_path.iterdir())) > 1


def unwritable(rank, workers, folder):
    folder.write_text("a file, where a folder should be")
    train(SHORT, SPARSE, keeper=Keeper(Saving(folder=folder / "checkpoints", every=Every(steps=5, seconds=None))))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    """With one sentence that says why, and no rank waits for another."""
    outcomes = on_processes(2, unwritable, tmp_path / "file", expect="any")
    for kind, text in outcomes:
        assert kind == "raised"
        first = text.splitlines()[0]
        assert first.startswith("CheckpointError: the checkpoint") and "could not be written: rank 0" in first


def on_a_full_disk(rank, workers, folder):
    """After the first checkpoint, rank 1 can write no file of more than 4 kB."""
    kept = Keeper(Saving(folder=folder, every=Every(steps=5, seconds=None)))
    full = FullDisk(kept) if rank == 1 else kept
    train(SHORT, SPARSE, keeper=full)


class FullDisk:
    """A keeper on a disk that is full from step 6 on."""

    def __init__(self, keeper):
        self._keeper = keeper
        self.restore = keeper.restore

    def after_step(self, run):
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if run.step >= 6 else limit, most))
        try:
            self._keeper.after_step(run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    """On all ranks, which name the one that could not write; nothing of the new one is left to take up room."""
    for kind, text in on_processes(2, on_a_full_disk, tmp_path, expect="any"):
        first = text.splitlines()[0]
        assert kind == "raised" and first.startswith("CheckpointError: the checkpoint"), first
        assert "could not be written: rank 1" in first and "The checkpoints before it are whole." in first
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000005"]
    assert resumed(tmp_path, "latest") == 5


def load_altered(rank, workers, folder, cases):
    """What becomes of checkpoints that were altered in one place, with their sums made right again."""
    train(SHORT.changed(max_steps=5), SPARSE, keeper=Keeper(Saving(folder=folder, every=Every(steps=5, seconds=None))))
    source, chance, found = folder / "step-00000005", random.Random(5), collections.Counter()
    run = Run(SHORT, SPARSE)
    for case in range(cases):
        altered = shutil.copytree(source, folder / "altered" / "step-00000005", dirs_exist_ok=True)
        what = chance.choice(["meta.json", "common.pt", "rank-00000.pt", "rank-00000.pt"])
        meta = json.loads((altered / "meta.json").read_text())
        if what == "meta.json":
            meta = mutated(meta, chance)
        else:
            torch.save(mutated(torch.load(source / what, weights_only=True), chance), altered / what)
            meta["files"][what] = facts_of(altered / what)
        (altered / "meta.json").write_text(json.dumps(meta))
        try:
            Keeper(Saving(resume=str(altered))).restore(run)
            found["loaded"] += 1
        except CheckpointError:
            found["refused"] += 1
        except Exception as error:
            found[f"case {case}, {what}: {error!r}"] += 1
    return found


def test_an_altered_checkpoint_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Whatever stands in it: no other error, no crash."""
    (found,) = on_processes(1, load_altered, tmp_path, 150)
    assert set(found) == {"loaded", "refused"}, found


@pytest.mark.parametrize(
    ("saving", "sentence"),
    [
        (Saving(resume="latest"), "add --checkpoint-dir"),
        (Saving(folder=Path("nowhere"), resume="latest"), "no checkpoint in nowhere"),
        (Saving(resume="nowhere/step-00000010"), "there is no checkpoint nowhere/step-00000010"),
        (Saving(folder=Path(__file__)), "it is a file"),
        (Saving(folder=Path("nowhere"), keep=0), "keep 1 or more"),
    ],
)
def test_what_cannot_be_saved_or_resumed_is_refused_at_once(saving: Saving, sentence: str) -> None:
    """Before any worker starts, in a sentence."""
    with pytest.raises(ConfigError, match=sentence):
        saving.check()


def test_a_new_run_does_not_mix_with_an_old_one(folder: Path) -> None:
    """A folder with checkpoints is gone on with, or left alone."""
    with pytest.raises(ConfigError, match="earlier run, the last one at step 27"):
        Saving(folder=folder).check()
    Saving(folder=folder, resume="latest").check()
    Saving(folder=folder / "other", resume="auto").check()


@pytest.mark.parametrize(
    ("text", "every"),
    [("100", Every(100, None)), ("30s", Every(None, 30)), ("5m", Every(None, 300)), ("1.5h", Every(None, 5400))],
)
def test_save_every_is_steps_or_a_time(text: str, every: Every) -> None:
    """A bare number counts steps; a time has a unit."""
    assert Every.parse(text) == every


@pytest.mark.parametrize("text", ["0", "0m", "-5", "1.5", "5 parsecs", "soon", ""])
def test_what_is_neither_is_refused(text: str) -> None:
    """The sentence shows how to write it."""
    with pytest.raises(ConfigError, match="100, 30s, 5m or 2h"):
        Every.parse(text)
